"""A proxy while one revision takes over from another: requests are answered by whichever has its pods ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from flowprefill.wire import Endpoint
from support.proxy_pods import FakeColocated, FakeDecode, FakePod, FakePrefill, serving, until
from support.proxy_under_test import running_proxy


@asynccontextmanager
async def pods_of(*pods: FakePod) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for pod in pods:
            pod.address = await stack.enter_async_context(serving(pod.app()))
        yield


def pair(revision: str) -> tuple[FakePrefill, FakeDecode]:
    prefill = FakePrefill(name=f"p-{revision}", revision=revision)
    return prefill, FakeDecode(name=f"d-{revision}", revision=revision, sources=[prefill])


def endpoints(*pods: FakePod, created_s: float, ready: bool = True) -> list[Endpoint]:
    return [pod.endpoint(created_s=created_s, ready=ready) for pod in pods]


async def test_a_proxy_of_a_new_revision_serves_with_the_old_ones_pods_until_its_own_are_ready(
    tmp_path: Path,
) -> None:
    old, new = pair("r0"), pair("r1")  # the proxy's own is r1
    async with pods_of(*old, *new):
        loading = endpoints(*new, created_s=2.0, ready=False)
        async with running_proxy(tmp_path, [*endpoints(*old, created_s=1.0), *loading]) as running:
            assert (await running.complete()).status_code == 200
            assert (len(old[1].seen), len(new[1].seen)) == (1, 0)
            running.write_endpoints([*endpoints(*old, created_s=1.0), *endpoints(*new, created_s=2.0)])
            await until(lambda: running.proxy.pods.revisions[0].name == "r1")
            assert (await running.complete()).status_code == 200
            assert (len(old[1].seen), len(new[1].seen)) == (1, 1)


async def test_a_service_whose_mode_changes_is_served_by_pods_of_either_mode(tmp_path: Path) -> None:
    old, new = pair("r0"), FakeColocated(name="c", revision="r1")  # the proxy's own is r1
    async with pods_of(*old, new):
        first = endpoints(*old, created_s=1.0)
        async with running_proxy(tmp_path, first, config={"mode": "Colocated"}) as running:
            assert (await running.complete()).status_code == 200
            old[0].gate.clear()
            under_way = asyncio.create_task(running.complete())
            await until(lambda: len(old[0].seen) == 2)
            running.write_endpoints([*first, *endpoints(new, created_s=2.0)])
            await until(lambda: running.proxy.pods.revisions[0].colocated)
            assert (await running.complete()).status_code == 200
            assert len(new.seen) == 1
            samples = await running.metrics()
            shown = {role: samples[f"flowprefill_proxy_endpoints{{role={role}}}"] for role in ("prefill", "decode", "colocated")}  # fmt: skip
            assert shown == {"prefill": 1, "decode": 1, "colocated": 1}
            old[0].gate.set()
            assert (await under_way).status_code == 200, "an old request ends where it began"
            assert len(old[1].seen) == 2
            running.write_endpoints(endpoints(new, created_s=2.0))
            await until(lambda: len(running.proxy.pods.revisions) == 1)
            assert (await running.complete()).status_code == 200
            assert "flowprefill_proxy_endpoints{role=decode}" not in await running.metrics()
            running.write_endpoints(first)
            await until(lambda: not running.proxy.pods.revisions[0].colocated)
            assert (await running.complete()).status_code == 200
            assert (await running.metrics())["flowprefill_proxy_endpoints{role=colocated}"] == 0
            await running.at_rest()


async def test_without_any_usable_pod_it_is_a_503_with_retry_after_once_the_wait_is_over(
    tmp_path: Path,
) -> None:
    prefill, decode = pair("r1")
    async with pods_of(prefill, decode):
        for known in (
            [],
            endpoints(prefill, created_s=1.0),
            endpoints(prefill, decode, created_s=1.0, ready=False),
        ):
            async with running_proxy(tmp_path, known, pod_wait_s=0.3) as running:
                answer = await running.complete()
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert not prefill.seen


async def test_a_pod_that_stops_serves_on_until_its_successor_is_ready(tmp_path: Path) -> None:
    """One replica that is evicted: its successor still loads its model."""
    prefill, decode = pair("r1")
    successor = FakePrefill(name="p-next", revision="r1")
    decode.sources.append(successor)
    async with pods_of(prefill, decode, successor):
        stays = endpoints(decode, created_s=1.0)
        leaves = [prefill.endpoint(created_s=1.0, terminating=True)]
        prefill.report(ready=False, draining=True)  # its lame duck has begun
        async with running_proxy(tmp_path, [*stays, *leaves]) as running:
            await until(lambda: all(pod.state for pod in running.proxy.pods.candidates()))
            assert (await running.complete()).status_code == 200
            trip = await running.http.post(f"{running.admin_url}/v1/round-trip", json={"revision": "r1"})
            assert trip.status_code == 503, "a revision without a pod that stays does not serve"
            running.write_endpoints([*stays, *leaves, *endpoints(successor, created_s=1.0)])
            await until(lambda: [pod.name for pod in running.proxy.pods.candidates()] == ["p-next"])
            assert (await running.complete()).status_code == 200
            assert (len(prefill.seen), len(successor.seen)) == (1, 1)
