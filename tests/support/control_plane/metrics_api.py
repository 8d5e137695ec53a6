"""A metrics API (metrics.k8s.io/v1beta1) whose CPU use a case sets, for a real HorizontalPodAutoscaler to scale on."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import trustme

from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

Json = dict[str, Any]

GROUP, VERSION = "metrics.k8s.io", "v1beta1"
API_SERVICE = f"{VERSION}.{GROUP}"
NAMESPACE, SERVICE = "kube-system", "test-metrics"
ROOT = f"/apis/{GROUP}/{VERSION}"
WINDOW = "1s"
AVAILABLE_S = 60.0

_RESOURCES: Json = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": f"{GROUP}/{VERSION}",
    "resources": [
        {
            "name": "pods",
            "kind": "PodMetrics",
            "namespaced": True,
            "singularName": "",
            "verbs": ["get", "list"],
        },
        {
            "name": "nodes",
            "kind": "NodeMetrics",
            "namespaced": False,
            "singularName": "",
            "verbs": ["get", "list"],
        },
    ],
}


class MetricsApi:
    """An API server for metrics of the pods that a control plane has. Start and stop it with `with`.

    Every container of a pod uses what `cpu_millicores` says of the pod (as in the API) at that moment; 0 by default.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.cpu_millicores: Callable[[Json], int] = lambda pod: 0
        self.requests = 0
        self._plane = plane
        self._http = httpx.Client(
            base_url=plane.url,
            headers={"authorization": "Bearer admin-token", "user-agent": "metrics-api"},
            verify=ssl.create_default_context(cafile=str(plane.pki.ca)),
            trust_env=False,
        )
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        authority = trustme.CA()
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(trust)
        self._server.socket = trust.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics API", daemon=True)

    def __enter__(self) -> MetricsApi:
        self._thread.start()
        try:
            self._register()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plane.kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")
        self._plane.kubectl("delete", "service", SERVICE, "-n", NAMESPACE, "--ignore-not-found")
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._http.close()

    def _register(self) -> None:
        """An ExternalName Service sends the API server's aggregator to this machine's own `localhost`."""
        port = self._server.server_address[1]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": SERVICE, "namespace": NAMESPACE},
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        }
        api_service = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API_SERVICE},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"name": SERVICE, "namespace": NAMESPACE, "port": port},
            },
        }
        for body in (service, api_service):
            self._plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))
        until(self._available, "the metrics API is available", within_s=AVAILABLE_S)

    def _available(self) -> bool:
        found = self._plane.get("apiservice", API_SERVICE)
        return any(
            c["type"] == "Available" and c["status"] == "True"
            for c in found.get("status", {}).get("conditions", ())
        )

    def _answer(self, target: str) -> Json | None:
        """The body of a GET, or None for what is not there."""
        url = urlsplit(target)
        if url.path == ROOT:
            return _RESOURCES
        found = re.fullmatch(rf"{ROOT}(?:/namespaces/([^/]+))?/pods(?:/([^/]+))?", url.path)
        if found is None:
            nodes: Json = {"kind": "NodeMetricsList", "apiVersion": f"{GROUP}/{VERSION}", "items": []}
            return nodes if url.path == f"{ROOT}/nodes" else None
        self.requests += 1
        namespace, name = found.groups()
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        path = "/api/v1/pods" if namespace is None else f"/api/v1/namespaces/{namespace}/pods"
        pods = self._http.get(path, params={"labelSelector": selector}).raise_for_status().json()["items"]
        items = [self._of(pod) for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if name is not None:
            return next((item for item in items if item["metadata"]["name"] == name), None)
        return {"kind": "PodMetricsList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}

    def _of(self, pod: Json) -> Json:
        cpu = f"{self.cpu_millicores(pod)}m"
        meta = pod["metadata"]
        return {
            "kind": "PodMetrics",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {key: meta[key] for key in ("name", "namespace", "labels") if key in meta},
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "window": WINDOW,
            "containers": [
                {"name": container["name"], "usage": {"cpu": cpu, "memory": "64Mi"}}
                for container in pod["spec"]["containers"]
            ],
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = api._answer(self.path)
                missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
                data = json.dumps(missing if body is None else body).encode()
                self.send_response(404 if body is None else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler
