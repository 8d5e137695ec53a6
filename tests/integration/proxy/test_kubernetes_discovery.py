"""Discovery on an API server that misbehaves in every way: over real sockets, against a fake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from flowprefill.proxy.kubernetes_api import WATCH_GRACE_S, WATCH_S, SlicesUnavailable
from flowprefill.proxy.kubernetes_discovery import KubernetesDiscovery
from support.counts import Counted
from support.discovery import Watcher, watching
from support.proxy_pods import serving, until
from support.slices import pod, slice_of, slices_of
from support.slices_api import FakeSlicesApi, fake_slices, slices_client, status

P0, P1 = pod("p0"), pod("p1")


@asynccontextmanager
async def discovering(
    *endpoints: Any, **limits: Any
) -> AsyncIterator[tuple[FakeSlicesApi, Watcher, Counted]]:
    """A watch that has reported `endpoints` from a fake API server."""
    counted = Counted()
    async with fake_slices(**limits) as (fake, client):
        fake.publish(slices_of(endpoints))
        discovery = KubernetesDiscovery(client, counts=counted, longest_pause_s=0.05)
        async with watching(discovery) as seen:
            await seen.until_names(e.name for e in endpoints)
            await until(lambda: counted.up, "the watch is established")
            yield fake, seen, counted


def lists(fake: FakeSlicesApi) -> int:
    return sum(1 for query in fake.requests if "watch" not in query)


def watches(fake: FakeSlicesApi) -> list[dict[str, str]]:
    return [query for query in fake.requests if "watch" in query]


async def test_a_watch_that_the_server_ends_goes_on_where_it_was_without_another_list() -> None:
    async with discovering(P0, watch_s=(1, 1)) as (fake, seen, counted):
        fake.bookmark()
        version = fake.version
        await until(lambda: len(watches(fake)) >= 2, "a second watch")
        assert watches(fake)[1]["resourceVersion"] == str(version)
        fake.publish(slices_of([P1]))
        await seen.until_names({"p1"})
        assert lists(fake) == 1
        assert not counted.failures


async def test_every_request_is_bounded_by_the_server_below_the_clients_own_limit() -> None:
    assert max(WATCH_S) + WATCH_GRACE_S < 90
    async with discovering(P0, watch_s=(7, 7)) as (fake, _, _):
        assert watches(fake)[0]["timeoutSeconds"] == "7"
        assert watches(fake)[0]["allowWatchBookmarks"].lower() == "true"


async def test_a_version_that_is_too_old_is_listed_anew_and_what_vanished_meanwhile_is_gone() -> None:
    async with discovering(P0, P1, watch_s=(1, 1)) as (fake, seen, counted):
        name = next(iter(fake.slices))
        fake.slices.pop(name)  # not told to watchers
        fake.slices |= {each["metadata"]["name"]: each for each in slices_of([P1])}
        fake.version += 10
        fake.forget_history()
        await seen.until_names({"p1"})
        assert lists(fake) == 2
        assert not counted.failures, "an old version is nothing to worry about"


async def test_a_watch_that_is_cut_silently_is_noticed() -> None:
    async with discovering(P0, watch_s=(1, 1), grace_s=0.5) as (fake, seen, counted):
        fake.quiet = True
        fake.publish(slices_of([P1]))
        await until(lambda: counted.failures["timeout"], "noticed")
        await seen.until_names({"p1"})


async def test_a_watch_that_breaks_off_in_the_middle_of_an_event_is_begun_anew() -> None:
    async with discovering(P0) as (fake, seen, counted):
        fake.cut_watches()
        await until(lambda: counted.failures["connection"] == 1, "noticed")
        fake.publish(slices_of([P1]))
        await seen.until_names({"p1"})
        await until(lambda: counted.up, "up again")


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (status(401), "unauthorized"),
        (status(403), "forbidden"),
        (status(429), "refused"),
        (status(500), "refused"),
        (lambda request: PlainTextResponse("<html>bad gateway</html>", status_code=502), "refused"),
        (lambda request: PlainTextResponse("<html>hello</html>\n"), "malformed"),
        (lambda request: PlainTextResponse('{"kind": "EndpointSliceList"}\n'), "malformed"),
        (lambda request: PlainTextResponse('{"type": "MODIFIED", "object": 3}\n'), "malformed"),
        (lambda request: PlainTextResponse('{"type": "MODIFIED"'), "connection"),
    ],
)
async def test_trouble_is_counted_and_told_once_and_the_last_endpoints_stay(
    answer: Any, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    def only_watches(request: Request) -> Response | None:
        return answer(request) if "watch" in request.query_params else None

    both = trouble in ("unauthorized", "forbidden", "refused")  # else a list that goes well comes in between
    with caplog.at_level(logging.INFO, logger="flowprefill.proxy"):
        async with discovering(P0) as (fake, seen, counted):
            fake.refuse = answer if both else only_watches
            fake.cut_watches()
            await until(lambda: counted.failures[trouble] >= 4, f"{trouble} is counted")
            assert seen.reports == [(), (P0,)] or seen.reports == [(P0,)]
            assert not both or not counted.up
            fake.refuse = lambda request: None
            fake.publish(slices_of([P1]))
            await seen.until_names({"p1"})
            await until(lambda: counted.up, "up again")
    told = [record.trouble for record in caplog.records if record.levelno == logging.WARNING]  # type: ignore[attr-defined]
    assert told in ([trouble], ["connection", trouble]), "the cut itself may be told before"


async def test_with_lists_alone_allowed_changes_still_arrive() -> None:
    async with discovering(P0) as (fake, seen, counted):
        fake.refuse = lambda r: status(403)(r) if "watch" in r.query_params else None
        fake.cut_watches()
        await until(lambda: counted.failures["forbidden"], "forbidden")
        fake.publish(slices_of([P1]))
        await seen.until_names({"p1"})
        assert not counted.up


async def test_no_api_server_at_all_is_counted_and_waited_for() -> None:
    fake, counted = FakeSlicesApi(), Counted()
    fake.publish(slices_of([P0]))
    async with serving(fake.app()) as address:
        pass  # gone again; the port is free
    async with slices_client(address) as client:
        discovery = KubernetesDiscovery(client, counts=counted, longest_pause_s=0.05)
        async with watching(discovery) as seen:
            await until(lambda: counted.failures["connection"] >= 2, "refused connections")
            assert seen.reports == [()]
            async with serving(fake.app(), port=int(address.rpartition(":")[2])):
                await seen.until_names({"p0"})


async def test_pauses_grow_up_to_a_bound() -> None:
    async with fake_slices() as (_, client):
        discovery = KubernetesDiscovery(client, counts=Counted())
        pauses_s = [discovery._failed(SlicesUnavailable("refused", "no")) for _ in range(40)]
    assert pauses_s[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert set(pauses_s[6:]) == {10.0}


async def test_watches_that_end_at_once_are_not_begun_without_a_pause() -> None:
    """A load balancer in between may end every watch politely and at once."""
    async with discovering(P0, watch_s=(0, 0)) as (fake, _, _):
        loop = asyncio.get_running_loop()
        began_s, before = loop.time(), len(watches(fake))
        await until(lambda: len(watches(fake)) >= before + 2, "two more watches")
        assert loop.time() - began_s >= 1.0


async def test_several_slices_of_one_service_are_merged_and_leave_one_by_one() -> None:
    async with discovering() as (fake, seen, _):
        fake.put(slice_of([P0], role="prefill", revision="r1", suffix="a"))
        fake.put(slice_of([P1], role="prefill", revision="r1", suffix="b"))
        await seen.until_names({"p0", "p1"})
        fake.delete("demo-prefill-r1-a")
        await seen.until_names({"p1"})
