"""A node without a kubelet: pods that are scheduled to it become what the case says, as fast as it can be written.

One thread with an event loop follows the pods of the node by a watch; nothing is polled. A pod whose wanted status
differs from what was last written stands once in a queue that a few writers empty, so that thousands of pods cost
one request a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from anyio.from_thread import start_blocking_portal

from support.control_plane.hollow_admin import HollowAdmin, HollowPod
from support.control_plane.hollow_api import STRATEGIC, Api, Refused
from support.control_plane.hollow_behaviour import (
    Behaviour,
    MountFails,
    Place,
    Runs,
    creating,
    mount_event,
    now_text,
    status_of,
)
from support.control_plane.hollow_machine import HOST_IP, Machine, pod_addresses
from support.control_plane.hollow_rules import Rule, Rules
from support.control_plane.hollow_volumes import volume_for
from support.control_plane.plane import ControlPlane

Json = dict[str, Any]
Result = TypeVar("Result")

WRITERS = 8
AGAIN_S = 0.5


@dataclass(slots=True)
class _Pod:
    """A pod of the node. `written` says which status the API server has from us; times on the loop's clock."""

    body: Json
    place: Place
    seen_s: float
    written: object = None
    running: bool = False
    ends_s: float | None = None


class HollowNode:
    """One node and its pods, by default all Ready at once. Start and stop it with `with`."""

    def __init__(self, plane: ControlPlane, *, name: str = "hollow", gpus: int = 0) -> None:
        """`gpus` > 0 offers that many nvidia.com/gpu, with the label that GPU pods select by."""
        self.name = name
        self.admin = HollowAdmin()
        self.statuses_written = 0
        self._plane = plane
        self._gpus = gpus
        self._rules = Rules()
        self._pods: dict[str, _Pod] = {}
        self._running = ExitStack()

    def __enter__(self) -> HollowNode:
        with ExitStack() as stack:
            self._block = stack.enter_context(pod_addresses())
            self._portal = stack.enter_context(start_blocking_portal(name=f"node {self.name}"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._live()))
            self._running = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def behave(
        self,
        behaviour: Behaviour,
        *,
        namespace: str | None = None,
        service: str | None = None,
        role: str | None = None,
        predicate: Callable[[Json], bool] | None = None,
        stops_after_s: float | None = 0.0,
    ) -> Rule:
        """From now on pods that match show `behaviour`, those that run already too; the newest rule wins."""
        rule = Rule(
            behaviour=behaviour,
            namespace=namespace,
            service=service,
            role=role,
            predicate=predicate,
            stops_after_s=stops_after_s,
        )
        self._rules.add(rule)
        self._look_again()
        return rule

    def forget(self, rule: Rule) -> None:
        """Take a rule back; its pods follow the rules that are left."""
        self._rules.remove(rule)
        self._look_again()

    def forget_all(self) -> None:
        """Take every rule back."""
        self._rules.clear()
        self._look_again()

    def num_pods(self) -> int:
        """Pods on the node now."""
        return len(self._pods)

    def call(self, work: Callable[[Api], Coroutine[Any, Any, Result]]) -> Result:
        """Run requests on the node's loop and wait for the result."""
        return self._portal.call(work, self._api)

    def _look_again(self) -> None:
        def all_pods() -> None:
            for uid in self._pods:
                self._enqueue(uid)

        self._portal.call(all_pods)

    # What follows runs on the node's thread.

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        """The node at work inside; work that fails ends the block with its error."""
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        async with AsyncExitStack() as stack:
            self._api = await stack.enter_async_context(Api(self._plane, user_agent="hollow-node"))
            stack.push_async_callback(self.admin.close)
            await self.admin.open()
            machine = Machine(self._api, self.name, gpus=self._gpus)
            await machine.register()
            work: list[Coroutine[Any, Any, object]] = [
                machine.heartbeats(),
                self._follow_pods(),
                self._follow_claims(),
                self._follow_documents(),
                *(self._write() for _ in range(WRITERS)),
            ]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(item) for item in work]
                yield
                for task in tasks:
                    task.cancel()

    async def _follow_pods(self) -> None:
        selector = f"spec.nodeName={self.name}"
        async for change, item in self._api.follow("/api/v1/pods", fieldSelector=selector):
            uid = item["metadata"]["uid"]
            if change == "DELETED":
                pod = self._pods.pop(uid, None)
                if pod is not None:
                    self.admin.gone(pod.place.pod_ip)
                continue
            known = self._pods.get(uid)
            if known is None:
                place = Place(pod_ip=next(self._block), host_ip=HOST_IP, started=now_text())
                self._pods[uid] = _Pod(body=item, place=place, seen_s=self._loop.time())
            else:
                known.body = item
            self._enqueue(uid)

    async def _follow_claims(self) -> None:
        async for change, claim in self._api.follow("/api/v1/persistentvolumeclaims"):
            volume = None if change == "DELETED" else volume_for(claim)
            if volume is None:
                continue
            try:
                await self._api.request("POST", "/api/v1/persistentvolumes", volume)
            except Refused as error:
                if error.status != 409:  # the claim was told twice
                    raise

    async def _follow_documents(self) -> None:
        selector = "flowprefill.io/service"
        async for change, item in self._api.follow("/api/v1/configmaps", labelSelector=selector):
            meta = item["metadata"]
            data = None if change == "DELETED" else item.get("data")
            self.admin.document(meta["namespace"], meta["name"], data)

    def _enqueue(self, uid: str) -> None:
        if uid not in self._queued:
            self._queued.add(uid)
            self._queue.put_nowait(uid)

    async def _write(self) -> None:
        while True:
            uid = await self._queue.get()
            self._queued.discard(uid)
            pod = self._pods.get(uid)
            if pod is None:
                continue
            try:
                await self._settle(uid, pod)
            except Refused as error:
                if error.status not in {404, 409, 410}:
                    self._loop.call_later(AGAIN_S, self._enqueue, uid)
            except (aiohttp.ClientError, TimeoutError, OSError):
                self._loop.call_later(AGAIN_S, self._enqueue, uid)

    async def _settle(self, uid: str, pod: _Pod) -> None:
        """Bring the API server's status of one pod to what its rule says, or finish its deletion."""
        rule = self._rules.of(pod.body)
        meta = pod.body["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if "deletionTimestamp" in meta:
            await self._finish(uid, pod, rule, path)
            return
        behaviour = rule.behaviour
        wait_s = pod.seen_s + behaviour.delay_s - self._loop.time() if isinstance(behaviour, Runs) else 0.0
        waits = wait_s > 0 and not pod.running
        wanted = "creating" if waits else behaviour
        if waits:
            self._loop.call_later(wait_s, self._enqueue, uid)
        if wanted == pod.written:
            return
        now = now_text()
        status = (
            creating(pod.body, pod.place, now) if waits else status_of(pod.body, behaviour, pod.place, now)
        )
        running = status["phase"] == "Running" and any(
            "running" in c["state"] for c in status["containerStatuses"]
        )
        await self._listen(pod, running=running, ready=isinstance(behaviour, Runs) and running)
        body = {"metadata": {"uid": uid}, "status": status}
        await self._api.request("PATCH", f"{path}/status", body, content_type=STRATEGIC)
        if isinstance(behaviour, MountFails):
            event = mount_event(pod.body, behaviour.message, now)
            await self._api.request("POST", f"/api/v1/namespaces/{meta['namespace']}/events", event)
        pod.written, pod.running = wanted, running
        self.statuses_written += 1

    async def _listen(self, pod: _Pod, *, running: bool, ready: bool) -> None:
        described = HollowPod.of(pod.body, ready=ready)
        if running and described is not None:
            await self.admin.runs(pod.place.pod_ip, described)
        else:
            self.admin.gone(pod.place.pod_ip)

    async def _finish(self, uid: str, pod: _Pod, rule: Rule, path: str) -> None:
        if rule.stops_after_s is None:
            return
        grace_s = float(pod.body["metadata"].get("deletionGracePeriodSeconds") or 0)
        if pod.ends_s is None:
            pod.ends_s = self._loop.time() + min(rule.stops_after_s, grace_s)
        wait_s = pod.ends_s - self._loop.time()
        if wait_s > 0:
            self._loop.call_later(wait_s, self._enqueue, uid)
            return
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        await self._api.request("DELETE", path, body)
