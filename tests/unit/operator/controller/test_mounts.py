"""Volumes that pods wait for, as Events tell them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flowprefill_operator.controller import mounts as module
from flowprefill_operator.controller.mounts import AT_MOST, EVERY_S, PATIENCE_S, Mounts
from flowprefill_operator.kinds import PODS
from flowprefill_operator.observe.observed import Observed, Pod, observe
from support.cluster_objects import owned_object, pod_status, running, status_body, unschedulable, waiting
from support.small_api import Answer, Request, SmallApi, small_api

NOTE = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
STARTING = pod_status(waiting("ContainerCreating"))
LOOK_AGAIN = PATIENCE_S


class Clock:
    """In the place of the module's `time`."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
async def both(clock: Clock) -> AsyncIterator[tuple[SmallApi, Mounts]]:
    async with small_api() as (api, cluster):
        said(api, [NOTE])
        yield api, Mounts(cluster)


Both = tuple[SmallApi, Mounts]


def said(api: SmallApi, notes: Iterable[str]) -> None:
    items = [{"note": note} for note in notes]
    api.answer = lambda request: (200, {"metadata": {"resourceVersion": "1"}, "items": items})


def pod(
    name: str = "p", *, age_s: float = 60.0, status: dict[str, Any] | None = None
) -> tuple[Observed, Pod]:
    item = owned_object(PODS, name, status=STARTING if status is None else status)
    since = datetime.now(UTC) - timedelta(seconds=age_s)
    item["metadata"]["creationTimestamp"] = since.isoformat(timespec="seconds").replace("+00:00", "Z")
    found = observe(PODS, item)
    assert isinstance(found.detail, Pod)
    return found, found.detail


async def test_a_pod_that_has_been_starting_for_a_while_is_asked_about(both: Both) -> None:
    api, mounts = both
    assert await mounts.unmounted([pod()]) == ({"p": NOTE}, LOOK_AGAIN)
    (request,) = api.requests
    assert request.path == "/apis/events.k8s.io/v1/namespaces/ns/events"
    assert request.query["fieldSelector"] == "regarding.kind=Pod,regarding.name=p,reason=FailedMount"


@pytest.mark.parametrize(
    ("status", "age_s", "again_s"),
    [
        (STARTING, PATIENCE_S / 2, LOOK_AGAIN),  # not yet
        (pod_status(running(), phase="Running"), 60, None),
        (pod_status(running(ready=True), phase="Running", ready=True), 60, None),
        (unschedulable("no room"), 60, None),
        (pod_status(waiting("ImagePullBackOff")), 60, None),
        (pod_status(waiting("PodInitializing"), init=(running(),)), 60, None),
    ],
)
async def test_a_pod_that_does_something_else_is_not(
    both: Both, status: dict[str, Any], age_s: float, again_s: float | None
) -> None:
    api, mounts = both
    assert await mounts.unmounted([pod(status=status, age_s=age_s)]) == ({}, again_s)
    assert api.requests == []


async def test_what_was_said_is_remembered_and_asked_again_only_after_a_while(
    both: Both, clock: Clock
) -> None:
    api, mounts = both
    await mounts.unmounted([pod()])
    assert (await mounts.unmounted([pod()]))[0] == {"p": NOTE}
    assert len(api.requests) == 1
    clock.now_s += EVERY_S
    said(api, [])
    assert (await mounts.unmounted([pod()]))[0] == {}
    assert len(api.requests) == 2


async def test_the_latest_of_several_events_is_told(both: Both) -> None:
    api, mounts = both
    said(api, ["first", "last"])
    assert (await mounts.unmounted([pod()]))[0] == {"p": "last"}


async def test_one_pass_asks_about_a_few_pods_and_the_next_about_others(both: Both) -> None:
    api, mounts = both
    pods = [pod(f"p{number}") for number in range(2 * AT_MOST)]
    assert len((await mounts.unmounted(pods))[0]) == AT_MOST
    assert len((await mounts.unmounted(pods))[0]) == 2 * AT_MOST
    assert len(api.requests) == 2 * AT_MOST


async def test_a_missing_right_is_told_until_it_is_there(both: Both, clock: Clock) -> None:
    api, mounts = both
    message = 'events.events.k8s.io is forbidden: User "o" cannot list resource "events"'
    refused: Answer = (403, status_body(403, "Forbidden", message))
    api.answer = lambda request: refused
    assert (await mounts.unmounted([pod()]))[0] == {}
    assert mounts.forbidden == {("list", "events.events.k8s.io")}
    clock.now_s += EVERY_S
    said(api, [NOTE])
    await mounts.unmounted([pod()])
    assert mounts.forbidden == frozenset()


async def test_a_server_that_does_not_answer_is_no_news(both: Both) -> None:
    api, mounts = both

    def broken(request: Request) -> Answer:
        return 500, b"no"

    api.answer = broken
    assert (await mounts.unmounted([pod()]))[0] == {}
    assert mounts.forbidden == frozenset()


async def test_pods_that_are_gone_are_forgotten(both: Both) -> None:
    api, mounts = both
    await mounts.unmounted([pod()])
    mounts.keep_only(set())
    await mounts.unmounted([pod()])
    assert len(api.requests) == 2
