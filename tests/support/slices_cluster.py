"""EndpointSlices on a real control plane, read through a relay with the rights that proxies get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio import config as credentials
from kubernetes.aio.client import ApiClient, Configuration

from flowprefill.proxy.kubernetes_api import SliceApi
from flowprefill.wire import Endpoint
from flowprefill_crd import parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.control_plane.plane import ControlPlane
from support.relay import Relay, relaying
from support.services import document
from support.slices import SERVICE, slices_of

ACCESS = ("ServiceAccount", "Role", "RoleBinding")


@dataclass
class ClusterSlices:
    """One namespace with the planned account of proxies."""

    plane: ControlPlane
    namespace: str
    planned: list[dict[str, Any]]
    relay: Relay
    kubeconfig: Path

    async def kubectl(self, *args: str, stdin: str | None = None) -> str:
        done = await asyncio.to_thread(self.plane.kubectl, "-n", self.namespace, *args, stdin=stdin)
        return done.stdout

    async def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        await self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(listed))

    async def publish(self, endpoints: Sequence[Endpoint]) -> None:
        """Make hand-made slices with these endpoints the ones there are."""
        wanted = [_in(each, self.namespace) for each in slices_of(endpoints)]
        names = {each["metadata"]["name"] for each in wanted}
        found = json.loads(await self.kubectl("get", "endpointslices", "-o", "json"))["items"]
        gone = [each["metadata"]["name"] for each in found if each["metadata"]["name"] not in names]
        if gone:
            await self.kubectl("delete", "endpointslices", *gone)
        if wanted:
            await self.apply(*wanted)

    @asynccontextmanager
    async def client(
        self, *, watch_s: tuple[int, int] = (30, 30), grace_s: float = 15.0
    ) -> AsyncIterator[SliceApi]:
        configuration = Configuration()
        await credentials.load_kube_config(str(self.kubeconfig), client_configuration=configuration)
        async with ApiClient(configuration) as api:
            yield SliceApi(api, namespace=self.namespace, service=SERVICE, watch_s=watch_s, grace_s=grace_s)


@asynccontextmanager
async def cluster_slices(plane: ControlPlane, namespace: str, folder: Path) -> AsyncIterator[ClusterSlices]:
    """A new namespace in which the account, Role and RoleBinding of proxies are as planned."""
    service = parse_service(document(name=SERVICE, namespace=namespace))
    planned: list[dict[str, Any]] = [dict(each) for each in plan(service, PlanSettings())]
    await asyncio.to_thread(plane.kubectl, "create", "namespace", namespace)
    async with relaying(int(plane.url.rpartition(":")[2])) as relay:
        found = ClusterSlices(plane, namespace, planned, relay, folder / f"{namespace}.kubeconfig")
        await found.apply(*(each for each in planned if each["kind"] in ACCESS))
        token = (await found.kubectl("create", "token", f"{SERVICE}-proxy")).strip()
        found.kubeconfig.write_text(json.dumps(_kubeconfig(plane, relay.port, token)))
        try:
            yield found
        finally:
            await asyncio.to_thread(plane.kubectl, "delete", "namespace", namespace, "--wait=false")


def _in(stored: dict[str, Any], namespace: str) -> dict[str, Any]:
    """A slice as it is to be created: in the namespace, the time left to the server."""
    metadata = {k: v for k, v in stored["metadata"].items() if k != "creationTimestamp"}
    endpoints = [
        {**each, "targetRef": {**each["targetRef"], "namespace": namespace}} for each in stored["endpoints"]
    ]
    return {**stored, "metadata": {**metadata, "namespace": namespace}, "endpoints": endpoints}


def _kubeconfig(plane: ControlPlane, port: int, token: str) -> dict[str, Any]:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(plane.pki.ca)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "proxy", "user": {"token": token}}],
        "contexts": [{"name": "proxy", "context": {"cluster": "test", "user": "proxy"}}],
    }
