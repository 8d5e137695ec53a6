"""The admin ports of hollow pods: what a real pod answers there, from one place.

Each pod listens on its own loopback address at the port that its template names `admin`. A pod that does not run
refuses connections, as a real one does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from flowprefill_crd.labels import ADMIN_PORT, REVISION, ROLE, SERVICE

Json = dict[str, Any]
WINDOWS = ("5m", "1h")


@dataclass(frozen=True, slots=True, kw_only=True)
class HollowPod:
    """What the admin port of a pod knows of it. `live_map` names the ConfigMap of the live document."""

    namespace: str
    name: str
    service: str
    role: str
    revision: str
    live_map: str | None
    port: int
    ready: bool

    @staticmethod
    def of(pod: Json, *, ready: bool) -> HollowPod | None:
        """The pod of a FlowPrefillService, or None for a pod without an admin port."""
        meta, spec = pod["metadata"], pod["spec"]
        labels: Mapping[str, str] = meta.get("labels", {})
        ports = [
            port["containerPort"]
            for container in spec["containers"]
            for port in container.get("ports", ())
            if port.get("name") == ADMIN_PORT
        ]
        if not ports or SERVICE not in labels:
            return None
        mounted = [volume["configMap"]["name"] for volume in spec.get("volumes", ()) if "configMap" in volume]
        return HollowPod(
            namespace=meta["namespace"],
            name=meta["name"],
            service=labels[SERVICE],
            role=labels.get(ROLE, ""),
            revision=labels.get(REVISION, ""),
            live_map=next((name for name in mounted if name.endswith("-live")), None),
            port=ports[0],
            ready=ready,
        )


class HollowAdmin:
    """Answers for every hollow pod. The switches may be set from any thread; keys are (namespace, service label)."""

    def __init__(self) -> None:
        self.failing_round_trips: dict[tuple[str, str], str] = {}
        """Services whose round trips fail, with the reason that the proxy gives."""
        self.lagging: set[tuple[str, str]] = set()
        """Services whose pods do not take over new live documents."""
        self.attainment: dict[tuple[str, str], Json] = {}
        """`classes` of a service's `/v1/attainment`; without an entry every class has 0 requests."""
        self.requests: dict[str, int] = {}
        """Requests answered by path."""
        self._pods: dict[str, HollowPod] = {}
        self._listening: dict[str, asyncio.Server] = {}
        self._documents: dict[tuple[str, str], Json] = {}
        self._in_use: dict[str, Json] = {}

    async def open(self) -> None:
        self._answers = web.Server(self._handle, access_log=None)

    async def close(self) -> None:
        for ip in list(self._listening):
            self.gone(ip)
        await self._answers.shutdown(1.0)

    def document(self, namespace: str, name: str, data: Mapping[str, str] | None) -> None:
        """A ConfigMap as it is now; None when it is gone."""
        text = (data or {}).get("live.json")
        if text is None:
            self._documents.pop((namespace, name), None)
        else:
            self._documents[namespace, name] = json.loads(text)

    async def runs(self, ip: str, pod: HollowPod) -> None:
        """From now on `pod` listens at `ip`."""
        self._pods[ip] = pod
        if ip not in self._listening:
            self._listening[ip] = await asyncio.get_running_loop().create_server(
                self._answers, ip, pod.port, backlog=16
            )

    def gone(self, ip: str) -> None:
        """Nobody listens at `ip` any more."""
        self._pods.pop(ip, None)
        self._in_use.pop(ip, None)
        server = self._listening.pop(ip, None)
        if server is not None:
            server.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        ip = request.transport.get_extra_info("sockname")[0]
        pod = self._pods.get(ip)
        path = request.path
        self.requests[path] = self.requests.get(path, 0) + 1
        if pod is None:
            return web.json_response({"detail": "no pod"}, status=503)
        match request.method, path:
            case "GET", "/health":
                return web.json_response({"status": "ok", "phase": "ready"})
            case "GET", "/ready":
                body = {"ready": pod.ready, "phase": "ready" if pod.ready else "starting"}
                return web.json_response(body, status=200 if pod.ready else 503)
            case "GET", "/v1/config":
                live = self._live(ip, pod)
                return web.json_response(
                    {
                        "role": pod.role,
                        "revision": pod.revision,
                        "generation": live.get("generation", 0),
                    }
                )
            case "GET", "/v1/attainment" if pod.role == "proxy":
                return web.json_response(self._attainment(self._live(ip, pod), pod))
            case "POST", "/v1/round-trip" if pod.role == "proxy":
                return await self._round_trip(request, pod)
            case _, "/health" | "/ready" | "/v1/config" | "/v1/attainment" | "/v1/round-trip":
                return _refused(405, f"{request.method} is not allowed here")
            case _:
                return _refused(404, f"there is no {path}")

    def _live(self, ip: str, pod: HollowPod) -> Json:
        newest = self._documents.get((pod.namespace, pod.live_map or ""))
        lags = (pod.namespace, pod.service) in self.lagging
        if newest is not None and (ip not in self._in_use or not lags):
            self._in_use[ip] = newest
        return self._in_use.get(ip, {})

    def _attainment(self, live: Json, pod: HollowPod) -> Json:
        known = self.attainment.get((pod.namespace, pod.service))
        if known is None:
            nothing: Json = {"met": 0, "missed": 0}
            counts = nothing | {"windows": dict.fromkeys(WINDOWS, nothing)}
            known = {c["name"]: counts for c in live.get("sloClasses", ())}
        return {"generation": live.get("generation", 0), "classes": known}

    async def _round_trip(self, request: web.BaseRequest, pod: HollowPod) -> web.StreamResponse:
        """Goes through when a ready pod of each role of that revision is here, unless the case says otherwise."""
        try:
            revision = json.loads(await request.text())["revision"]
        except (ValueError, KeyError, TypeError) as error:
            return _refused(400, f"the body has no revision: {error}")
        peers = [
            other.role
            for other in self._pods.values()
            if (other.namespace, other.service, other.revision) == (pod.namespace, pod.service, revision)
            and other.ready
        ]
        reason = self.failing_round_trips.get((pod.namespace, pod.service))
        if reason is None and not ("colocated" in peers or {"prefill", "decode"} <= set(peers)):
            reason = f"no ready pair of revision {revision}"
        if reason is not None:
            return web.json_response({"revision": revision, "ok": False, "reason": reason}, status=503)
        return web.json_response({"revision": revision, "ok": True, "seconds": 0.01})


def _refused(status: int, message: str) -> web.Response:
    """An error in OpenAI's envelope, as real pods answer."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)
