"""The node object of a hollow node, its heartbeats, and the addresses of its pods."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from support.control_plane.hollow_api import APPLY, STRATEGIC, Api, Refused
from support.control_plane.hollow_behaviour import now_text

Json = dict[str, Any]

HEARTBEAT_S = 10.0
"""As a kubelet's; the node controller waits 40 s and more for the next one."""
LEASE_S = 40
ALLOCATABLE = {"cpu": "100k", "memory": "1Pi", "pods": "100k", "ephemeral-storage": "1Pi"}
HOST_IP = "127.0.0.1"
GPU = "nvidia.com/gpu"
GPU_LABELS = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
"""As NVIDIA's feature discovery sets them; samples select nodes by them."""
LOCK_PORT = 47_640


class Machine:
    """One node object."""

    def __init__(self, api: Api, name: str, *, gpus: int) -> None:
        self._api = api
        self._name = name
        self._offered = ALLOCATABLE | ({GPU: str(gpus)} if gpus else {})
        self._labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        if gpus:
            self._labels |= GPU_LABELS

    async def register(self) -> None:
        """Make the node and wait until pods may be scheduled to it."""
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._name, "labels": self._labels},
        }
        try:
            await self._api.request("POST", "/api/v1/nodes", node)
        except Refused as error:
            if error.status != 409:
                raise
        await self._beat()
        async for _, found in self._api.follow("/api/v1/nodes", fieldSelector=f"metadata.name={self._name}"):
            if not found["spec"].get("taints"):
                return

    async def heartbeats(self) -> None:
        """Keep it Ready, for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._beat()
            except (Refused, aiohttp.ClientError, TimeoutError, OSError):
                continue  # an API server that is away gets the next one

    async def _beat(self) -> None:
        now = now_text()
        ready = {"status": "True", "reason": "KubeletReady", "message": "hollow"}
        status = {
            "capacity": self._offered,
            "allocatable": self._offered,
            "addresses": [{"type": "InternalIP", "address": HOST_IP}],
            "conditions": [{"type": "Ready", "lastHeartbeatTime": now, "lastTransitionTime": now} | ready],
        }
        path = f"/api/v1/nodes/{self._name}/status"
        await self._api.request("PATCH", path, {"status": status}, content_type=STRATEGIC)
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": self._name,
                "leaseDurationSeconds": LEASE_S,
                "renewTime": now.replace("Z", ".000000Z"),
            },
        }
        await self._api.request(
            "PATCH",
            f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self._name}",
            lease,
            content_type=APPLY,
            params={"fieldManager": "hollow-node", "force": "true"},
        )


@contextmanager
def pod_addresses() -> Iterator[Iterator[str]]:
    """Addresses 127.x.y.z that no other process's node gives away: who listens at 127.x.0.1 has the block."""
    with socket.socket() as lock:
        for block in range(64, 255):
            try:
                lock.bind((f"127.{block}.0.1", LOCK_PORT))
            except OSError:
                continue
            lock.listen(1)
            numbers = itertools.product(range(1, 256), range(1, 255))
            yield (f"127.{block}.{high}.{low}" for high, low in numbers)
            return
        raise AssertionError("every block of addresses from 127.64 to 127.254 is taken by another test")
