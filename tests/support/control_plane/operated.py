"""An operator at work on a control plane with a hollow node, and what a user does and sees there."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.generate import ROOT
from flowprefill_operator.kinds import OWNED, PODS, SERVICES, Kind
from support.control_plane.faults import FaultyApiServer
from support.control_plane.hollow import HollowNode
from support.control_plane.operator_identity import ACCOUNT, grant, kubeconfig
from support.control_plane.operator_process import OperatorProcess
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

Json = dict[str, Any]

OWNER_LABEL = "flowprefill.io/owner-uid"
READY_S = 60.0
MERGE = "application/merge-patch+json"
GONE = {404, 410}
BUSY_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Operated:
    """One operator, what it works on, and what stands between them."""

    plane: ControlPlane
    node: HollowNode
    faulty: FaultyApiServer
    operator: OperatorProcess
    http: httpx.Client = field(repr=False)

    # What a user does.

    def apply(self, namespace: str, body: Json) -> Json:
        """Apply a FlowPrefillService as `kubectl apply --server-side` does."""
        path = SERVICES.path(namespace, body["metadata"]["name"])
        params = {"fieldManager": "user", "force": "true"}
        answer = self.http.patch(
            path,
            content=json.dumps(body),
            params=params,
            headers={"content-type": "application/apply-patch+yaml"},
        )
        return self._body(answer)

    def edit(self, kind: Kind, namespace: str, name: str, change: Json, *, part: str | None = None) -> Json:
        """Change an object by a merge patch, as somebody with kubectl would."""
        path = kind.path(namespace, name, part)
        params = {"fieldManager": "somebody"}
        return self._body(
            self.http.patch(path, content=json.dumps(change), params=params, headers={"content-type": MERGE})
        )

    def change(self, namespace: str, name: str, spec: Json) -> Json:
        """Change a service's spec by a merge patch."""
        return self.edit(SERVICES, namespace, name, {"spec": spec})

    def create(self, kind: Kind, namespace: str, body: Json) -> Json:
        return self._body(self.http.post(kind.path(namespace), json=body))

    def delete(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete an object; done already is done."""
        answer = self.http.delete(kind.path(namespace, name), params={"propagationPolicy": "Background"})
        if answer.status_code not in GONE:
            self._body(answer)

    # What a user sees.

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        """An object, or None."""
        answer = self.http.get(kind.path(namespace, name))
        return None if answer.status_code in GONE else self._body(answer)

    def list(self, kind: Kind, namespace: str, **labels: str) -> list[Json]:
        """Objects of a namespace by their labels (dots and dashes of keys as they are, through `**`)."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        params = {"labelSelector": selector} if selector else None
        answer = self.http.get(kind.path(namespace), params=params)
        end_s = time.monotonic() + BUSY_S
        while answer.status_code == 429 and time.monotonic() < end_s:  # a CRD that came just now
            time.sleep(float(answer.headers.get("retry-after", "1")))
            answer = self.http.get(kind.path(namespace), params=params)
        if answer.status_code in GONE:  # an API that this cluster does not have
            return []
        found: list[Json] = self._body(answer)["items"]
        return found

    def service(self, namespace: str, name: str) -> Json:
        found = self.get(SERVICES, namespace, name)
        assert found is not None, f"FlowPrefillService {namespace}/{name} is gone"
        return found

    def conditions(self, namespace: str, name: str) -> dict[str, Json]:
        """Conditions of the present generation by type; older ones say nothing of the spec as it is."""
        body = self.service(namespace, name)
        known = body.get("status", {}).get("conditions", ())
        return {c["type"]: c for c in known if c["observedGeneration"] == body["metadata"]["generation"]}

    def wait_condition(
        self,
        namespace: str,
        name: str,
        kind: str,
        status: str,
        *,
        reason: str | None = None,
        says: str = "",
        within_s: float = READY_S,
    ) -> Json:
        """Wait for a condition with that status, reason and text."""

        def look() -> Json | None:
            found = self.conditions(namespace, name).get(kind)
            if found is None or found["status"] != status or reason not in (None, found["reason"]):
                return None
            return found if says in found["message"] else None

        try:
            return until(look, f"{kind}={status} {reason or ''} {says}", within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told(namespace, name)}") from None

    def wait_ready(self, namespace: str, name: str, *, within_s: float = READY_S) -> Json:
        """Wait until the service as it is specified now is Ready."""
        return self.wait_condition(namespace, name, "Ready", "True", within_s=within_s)

    def told(self, namespace: str, name: str) -> str:
        """Everything that the service's conditions and the operator's log say, for a failure's message."""
        lines = [
            f"{c['type']}={c['status']} {c['reason']}: {c['message']}"
            for c in self.service(namespace, name).get("status", {}).get("conditions", ())
        ]
        return "\n".join([*lines, self.operator.tail()])

    def owned(self, namespace: str, uid: str) -> dict[tuple[str, str], Json]:
        """Objects that were made for the service with that uid, by kind and name."""
        return {
            (kind.kind, item["metadata"]["name"]): item
            for kind in OWNED
            for item in self.list(kind, namespace, **{OWNER_LABEL: uid})
        }

    def pods(self, namespace: str, service: str, role: str | None = None) -> list[Json]:
        """Pods of a service that are to stay."""
        labels = {"flowprefill.io/service": service} | ({"flowprefill.io/role": role} if role else {})
        return [p for p in self.list(PODS, namespace, **labels) if "deletionTimestamp" not in p["metadata"]]

    def revisions(self, namespace: str, service: str) -> set[str]:
        """Revisions of a service's pods that are to stay. The one before leaves some time after Ready."""
        return {pod["metadata"]["labels"]["flowprefill.io/revision"] for pod in self.pods(namespace, service)}

    @contextmanager
    def operator_down(self) -> Iterator[None]:
        """No operator runs inside."""
        self.operator.stop()
        try:
            yield
        finally:
            self.operator.start()
            self.operator.wait_ready()

    @staticmethod
    def _body(answer: httpx.Response) -> Json:
        assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.text}"
        found: Json = answer.json()
        return found


@contextmanager
def operated(
    plane: ControlPlane,
    folder: Path,
    *,
    account: str = ACCOUNT,
    namespaces: tuple[str, ...] = (),
    **config: object,
) -> Iterator[Operated]:
    """An operator with the chart's rights behind a faulty API server; `config` as for `OperatorProcess`."""
    install_crd(plane)
    grant(plane, name=account, namespaces=namespaces)
    with ExitStack() as stack:
        node = stack.enter_context(HollowNode(plane, gpus=1000))
        faulty = stack.enter_context(FaultyApiServer(plane))
        credentials = kubeconfig(plane, faulty.url, folder / "operator.kubeconfig", name=account)
        process = OperatorProcess(credentials, folder / "operator", namespaces=list(namespaces), **config)
        operator = stack.enter_context(process)
        http = stack.enter_context(admin_client(plane))
        yield Operated(plane=plane, node=node, faulty=faulty, operator=operator, http=http)


def install_crd(plane: ControlPlane) -> None:
    """The CRD of the working tree, served."""
    plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / f"{CRD_NAME}.yaml"))
    plane.until_done("wait", "--for=condition=Established", "--timeout=60s", f"crd/{CRD_NAME}")


def admin_client(plane: ControlPlane) -> httpx.Client:
    """HTTP to the API server itself, past every fault."""
    return httpx.Client(
        base_url=plane.url,
        headers={"authorization": "Bearer admin-token", "user-agent": "a-user"},
        verify=ssl.create_default_context(cafile=str(plane.pki.ca)),
        trust_env=False,
        timeout=30.0,
    )


def simulated(name: str, **spec: Any) -> Json:
    """A small service; fields of `spec` replace its own."""
    classes = [
        {"name": "chat", "ttftMilliseconds": 1000, "objective": "95", "default": True},
        {"name": "document", "ttftMilliseconds": 8000, "objective": "90"},
    ]
    base: Mapping[str, Any] = {
        "model": {"uri": "embedded://tiny"},
        "engine": {"type": "simulated"},
        "sloClasses": classes,
    }
    return {
        "apiVersion": "flowprefill.io/v1alpha1",
        "kind": "FlowPrefillService",
        "metadata": {"name": name},
        "spec": {**base, **spec},
    }


def seconds_until(look: Any, what: str, *, within_s: float) -> float:
    """How long it took until something was there, in seconds."""
    start_s = time.monotonic()
    until(look, what, within_s=within_s)
    return time.monotonic() - start_s
