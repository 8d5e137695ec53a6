"""Discovery on real API servers: with exactly the rights planned for proxies, and over a network that fails."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowprefill.proxy.discovery import Discovery
from flowprefill.proxy.kubernetes_discovery import KubernetesDiscovery
from flowprefill.wire import Endpoint
from flowprefill_operator.node.ports import free_ports
from support.control_plane.plane import ControlPlane
from support.counts import Counted
from support.discovery import Source, watching
from support.discovery_contract import (
    test_a_source_that_is_away_leaves_the_last_endpoints_and_tells_later_changes,
    test_a_watch_begins_while_the_source_is_away,
    test_the_first_report_comes_without_any_pod,
)
from support.proxy_pods import until
from support.slices import SERVICE, pod, slices_of
from support.slices_cluster import ClusterSlices, cluster_slices

__all__ = [
    "test_a_source_that_is_away_leaves_the_last_endpoints_and_tells_later_changes",
    "test_a_watch_begins_while_the_source_is_away",
    "test_the_first_report_comes_without_any_pod",
]

LONGEST_PAUSE_S = 0.2


@pytest.fixture
async def cluster(control_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[ClusterSlices]:
    async with cluster_slices(control_plane, f"slices-{uuid.uuid4().hex[:8]}", tmp_path) as found:
        yield found


class ApiServer:
    """A real API server behind a relay that can be cut (a `Source`)."""

    def __init__(self, cluster: ClusterSlices, discovery: Discovery) -> None:
        self._cluster = cluster
        self.discovery = discovery

    async def publish(self, endpoints: Sequence[Endpoint]) -> None:
        await self._cluster.publish(endpoints)

    async def break_off(self) -> None:
        await self._cluster.relay.cut()

    async def mend(self) -> None:
        await self._cluster.relay.start()


@pytest.fixture
async def source(cluster: ClusterSlices) -> AsyncIterator[Source]:
    async with cluster.client() as client:
        discovery = KubernetesDiscovery(client, counts=Counted(), longest_pause_s=LONGEST_PAUSE_S)
        yield ApiServer(cluster, discovery)


async def test_services_and_pods_as_planned_are_found_through_the_slices_that_kubernetes_makes(
    cluster: ClusterSlices,
) -> None:
    """The labels come from the Services: Kubernetes hands them down to the slices."""
    services = [each for each in cluster.planned if each["kind"] == "Service"]
    templates = {
        each["spec"]["template"]["metadata"]["labels"]["flowprefill.io/role"]: each["spec"]["template"]
        for each in cluster.planned
        if each["kind"] == "Deployment"
    }
    node = f"node-of-{cluster.namespace}"
    await cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}, *services)
    async with cluster.client() as client:
        discovery = KubernetesDiscovery(client, counts=Counted())
        async with watching(discovery) as seen:
            for number, (role, template) in enumerate(templates.items()):
                await hollow_pod(cluster, f"{role}-pod", template, node, f"10.20.0.{number + 1}")
            await seen.until_names({"prefill-pod", "decode-pod", "proxy-pod"})
            for role in ("prefill", "decode"):
                labels = templates[role]["metadata"]["labels"]
                found = seen.endpoint(f"{role}-pod")
                assert (found.role, found.revision) == (role, labels["flowprefill.io/revision"])
                assert (found.address[-5:], found.admin[-5:]) == (":8000", ":9000")
                assert found.ready
                assert found.created_s > 1.7e9
            assert (seen.endpoint("proxy-pod").role, seen.endpoint("proxy-pod").revision) == ("proxy", "")

            await ready(cluster, "prefill-pod", "10.20.0.1", is_ready=False)
            await seen.until(lambda: not seen.endpoint("prefill-pod").ready, "not ready")
            # Its node runs nothing, so the pod stays as one that is being stopped.
            await cluster.kubectl("delete", "pod", "decode-pod", "--wait=false")
            await seen.until(lambda: seen.endpoint("decode-pod").terminating, "terminating")
            assert seen.endpoint("decode-pod").ready, "it serves on while it stops"
            await cluster.kubectl("delete", "pod", "decode-pod", "--force", "--grace-period=0")
            await seen.until_names({"prefill-pod", "proxy-pod"})
    await cluster.kubectl("delete", "node", node, "--wait=false")


async def test_slices_of_other_services_and_namespaces_are_not_reported(
    cluster: ClusterSlices, control_plane: ControlPlane
) -> None:
    await cluster.publish([pod("p0")])
    other = slices_of([pod("p1")], service="demo2")[0]
    del other["metadata"]["creationTimestamp"], other["metadata"]["namespace"]
    await cluster.apply(other)
    elsewhere = slices_of([pod("p2")])[0]
    del elsewhere["metadata"]["creationTimestamp"]
    elsewhere["metadata"]["namespace"] = "default"
    await asyncio.to_thread(control_plane.kubectl, "apply", "-f", "-", stdin=json.dumps(elsewhere))
    async with cluster.client() as client, watching(KubernetesDiscovery(client, counts=Counted())) as seen:
        await seen.until_names({"p0"})
        await cluster.apply(_unstamped(slices_of([pod("p0"), pod("p3")])[0]))
        await seen.until_names({"p0", "p3"})
    await asyncio.to_thread(
        control_plane.kubectl, "delete", "endpointslice", "-n", "default", elsewhere["metadata"]["name"]
    )


async def test_rights_that_are_taken_leave_the_last_endpoints_and_given_back_changes_arrive(
    cluster: ClusterSlices,
) -> None:
    counted = Counted()
    await cluster.publish([pod("p0")])
    async with cluster.client(watch_s=(2, 2)) as client:
        discovery = KubernetesDiscovery(client, counts=counted, longest_pause_s=LONGEST_PAUSE_S)
        async with watching(discovery) as seen:
            await seen.until_names({"p0"})
            await cluster.kubectl("delete", "rolebinding", f"{SERVICE}-proxy")
            await until(lambda: counted.failures["forbidden"] >= 2, "forbidden")
            assert not counted.up
            await cluster.publish([pod("p1")])
            assert seen.names == {"p0"}
            await cluster.apply(*(each for each in cluster.planned if each["kind"] == "RoleBinding"))
            await seen.until_names({"p1"})
            assert set(counted.failures) == {"forbidden"}


async def test_a_watch_that_a_network_forgot_is_noticed_and_what_vanished_meanwhile_goes(
    cluster: ClusterSlices,
) -> None:
    counted = Counted()
    await cluster.publish([pod("p0"), pod("d0", "decode")])
    async with cluster.client(watch_s=(2, 2), grace_s=2.0) as client:
        discovery = KubernetesDiscovery(client, counts=counted, longest_pause_s=LONGEST_PAUSE_S)
        async with watching(discovery) as seen:
            await seen.until_names({"p0", "d0"})
            cluster.relay.silence()
            await cluster.publish([pod("p0")])
            await until(lambda: counted.failures["timeout"], "noticed")
            assert seen.names == {"p0", "d0"}
            cluster.relay.resume()
            await seen.until_names({"p0"})


async def test_the_proxy_command_follows_the_slices_of_its_service(
    cluster: ClusterSlices, tmp_path: Path
) -> None:
    members = [pod("p0"), pod("d0", "decode"), pod("x0", "proxy", ""), pod("x1", "proxy", "")]
    await cluster.publish(members)
    for each in cluster.planned:
        if each["kind"] == "ConfigMap":
            for name, text in each["data"].items():
                (tmp_path / name).write_text(text)
    port, admin = free_ports(2)
    args = ["--config", "config.json", "--live", ".", "--discover", "kubernetes"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flowprefill.cli", "proxy", *args),
            *("--port", str(port), "--admin-port", str(admin)),
            cwd=tmp_path,
            env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}", trust_env=False) as http:

            async def metric(name: str) -> str:
                try:
                    text = (await http.get("/metrics")).text
                except httpx.TransportError:
                    assert process.returncode is None, log.read_text()
                    return ""
                return next((row.split()[-1] for row in text.splitlines() if row.startswith(name)), "")

            async with asyncio.timeout(60):
                while await metric("flowprefill_proxy_discovery_up{") != "1.0":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert await metric('flowprefill_proxy_endpoints{model_name="tiny",role="prefill"') == "1.0"
            assert (await http.get("/ready")).status_code == 200
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def hollow_pod(
    cluster: ClusterSlices, name: str, template: dict[str, Any], node: str, address: str
) -> None:
    """A pod with the template's labels and ports that is said to run on a node that is not there."""
    container = template["spec"]["containers"][0]
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": {
            "nodeName": node,
            "containers": [
                {"name": container["name"], "image": "none", "ports": container["ports"]},
            ],
        },
    }
    await cluster.apply(body)
    await ready(cluster, name, address)


async def ready(cluster: ClusterSlices, name: str, address: str, *, is_ready: bool = True) -> None:
    """Say of a pod what a kubelet would."""
    condition = {"type": "Ready", "status": "True" if is_ready else "False"}
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [condition],
    }
    patch = json.dumps({"status": status})
    await cluster.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)


def _unstamped(stored: dict[str, Any]) -> dict[str, Any]:
    metadata = {k: v for k, v in stored["metadata"].items() if k not in ("creationTimestamp", "namespace")}
    return {**stored, "metadata": metadata}
