"""What pods say when they are asked, and what is made of it when they do not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from flowprefill_operator.controller import prober as module
from flowprefill_operator.controller.prober import ATTAINMENT_EVERY_S, MAX_ANSWER_BYTES, Ask, Prober
from flowprefill_operator.status.view import Reports
from support.admin_port import AdminPort, window

KEY = ("ns", "example")
NOBODY = "127.0.0.1:1"
WAIT_S = 20.0


class Asking:
    """A prober, and the services that it has told of."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.prober = Prober(http, self.told.put_nowait)

    async def until(self, ask: Ask, **wanted: Any) -> Reports:
        """Ask, as passes do, until the reports are as wanted."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self.prober.ask(KEY, ask)
                reports = self.prober.reports(KEY)
                if all(getattr(reports, name) == value for name, value in wanted.items()):
                    return reports
                await asyncio.sleep(0.005)

    async def once(self, ask: Ask) -> Reports:
        """Ask once and wait for what comes of it."""
        self.prober.ask(KEY, ask)
        task = self.prober._known[KEY].task
        assert task is not None
        async with asyncio.timeout(WAIT_S):
            await task
        return self.prober.reports(KEY)


@pytest.fixture
async def asking(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    monkeypatch.setitem(Prober._json.__kwdefaults__, "timeout_s", 0.5)
    monkeypatch.setattr(module, "ROUND_TRIP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "RETRY_S", (0.01, 0.02))
    async with aiohttp.ClientSession() as http:
        found = Asking(http)
        yield found
        await found.prober.close()


@pytest.fixture
async def pod() -> AsyncIterator[AdminPort]:
    async with AdminPort() as port:
        yield port


@pytest.fixture
async def other() -> AsyncIterator[AdminPort]:
    async with AdminPort() as port:
        yield port


def ask(
    *,
    proxies: dict[str, str] | None = None,
    pods: dict[str, str] | None = None,
    generation: int | None = None,
    prove: str | None = None,
    provers: dict[str, str] | None = None,
) -> Ask:
    return Ask(
        proxies=proxies or {}, pods=pods or {}, generation=generation, prove=prove, provers=provers or {}
    )


async def test_each_pod_tells_the_live_document_that_it_follows_and_is_asked_until_it_is_the_right_one(
    asking: Asking, pod: AdminPort, other: AdminPort
) -> None:
    pod.config = {"generation": 2}
    wanted = ask(pods={"a": pod.address, "b": other.address}, generation=2)
    assert (await asking.once(wanted)).generations == {"a": 2, "b": 1}
    assert asking.told.get_nowait() == KEY
    other.config = {"generation": 2}
    await asking.until(wanted, generations={"a": 2, "b": 2})
    seen = pod.asked["/v1/config"]
    # All follow it: nobody is asked again, and nothing hurries.
    assert asking.prober.ask(KEY, wanted) is None
    assert seen == 1
    # A new document: both are.
    await asking.once(ask(pods={"a": pod.address, "b": other.address}, generation=3))
    assert pod.asked["/v1/config"] == seen + 1


async def test_pods_that_are_gone_are_forgotten(asking: Asking, pod: AdminPort) -> None:
    await asking.until(
        ask(pods={"a": pod.address, "b": pod.address}, generation=1), generations={"a": 1, "b": 1}
    )
    asking.prober.ask(KEY, ask(pods={"b": pod.address}, generation=1))
    assert asking.prober.reports(KEY).generations == {"b": 1}


GARBAGE: dict[str, Any] = {
    "no JSON": b"<html>",
    "not text": b"\xff\xfe\x00",
    "a list": b"[1]",
    "nested without end": b"[" * 100_000,
    "another type": {"generation": "1", "classes": {"chat": 3}, "ok": "yes"},
    "counts that are none": {"classes": {"chat": {"windows": {"1h": {"met": "many", "missed": None}}}}},
    "windows that are none": {"classes": {"chat": {"windows": 3}}},
    "too long": b" " * (MAX_ANSWER_BYTES + 1) + b'{"generation": 1}',
    "an error": 500,
    "elsewhere": "http://127.0.0.1:1/",
    "never": None,
}


@pytest.mark.parametrize("case", GARBAGE)
async def test_an_answer_that_makes_no_sense_is_none(asking: Asking, pod: AdminPort, case: str) -> None:
    pod.config = pod.attainment = pod.round_trip = GARBAGE[case]
    at = {"p": pod.address}
    reports = await asking.once(ask(proxies=at, pods=at, generation=1, prove="rev", provers=at))
    assert (reports.generations, reports.attainment, reports.proven) == ({}, None, frozenset())
    assert reports.unproven
    # The pass is told, so that the status is written all the same.
    assert asking.told.get_nowait() == KEY
    assert not asking.prober.is_new(KEY)


async def test_a_pod_sends_the_operator_nowhere_else(
    asking: Asking, pod: AdminPort, other: AdminPort
) -> None:
    pod.config = f"http://{other.address}/v1/config"
    reports = await asking.once(ask(pods={"a": pod.address}, generation=1))
    assert reports.generations == {}
    assert other.asked.total() == 0


async def test_a_revision_is_proven_by_one_token_and_then_not_tried_again(
    asking: Asking, pod: AdminPort
) -> None:
    wanted = ask(prove="rev", provers={"p": pod.address})
    reports = await asking.until(wanted, proven=frozenset({"rev"}))
    assert reports.unproven is None
    async with asyncio.timeout(WAIT_S):  # what is known is told a moment later
        assert await asking.told.get() == KEY
    assert pod.bodies == [{"revision": "rev"}]
    assert asking.prober.ask(KEY, wanted) is None
    assert pod.asked["/v1/round-trip"] == 1


async def test_a_trial_that_fails_is_told_and_repeated_by_one_proxy_after_the_other(
    asking: Asking, pod: AdminPort, other: AdminPort
) -> None:
    pod.round_trip = {"revision": "rev", "ok": False, "reason": "no decode pod answers"}
    other.round_trip = {"revision": "rev", "ok": False, "reason": "no decode pod answers"}
    wanted = ask(prove="rev", provers={"a": pod.address, "b": other.address})
    await asking.until(wanted, unproven="no decode pod answers")
    async with asyncio.timeout(WAIT_S):
        while min(pod.asked["/v1/round-trip"], other.asked["/v1/round-trip"]) < 2:
            asking.prober.ask(KEY, wanted)
            await asyncio.sleep(0.005)
    assert abs(pod.asked["/v1/round-trip"] - other.asked["/v1/round-trip"]) <= 1
    other.round_trip = {"ok": True}
    reports = await asking.until(wanted, proven=frozenset({"rev"}))
    assert reports.unproven is None


async def test_a_trial_waits_for_its_pause(
    asking: Asking, pod: AdminPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", (60.0,))
    pod.round_trip = 503
    wanted = ask(prove="rev", provers={"p": pod.address})
    await asking.once(wanted)
    again_s = asking.prober.ask(KEY, wanted)
    assert again_s is not None
    assert math.isclose(again_s, 60.0, abs_tol=5.0)
    for _ in range(10):
        asking.prober.ask(KEY, wanted)
        await asyncio.sleep(0)
    assert pod.asked["/v1/round-trip"] == 1


async def test_another_revision_is_tried_at_once_and_has_not_failed(
    asking: Asking, pod: AdminPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", (60.0,))
    pod.round_trip = {"ok": False, "reason": "no decode pod answers"}
    await asking.once(ask(prove="old", provers={"p": pod.address}))
    pod.round_trip = None
    asking.prober.ask(KEY, ask(prove="new", provers={"p": pod.address}))
    assert asking.prober.reports(KEY).unproven is None
    async with asyncio.timeout(WAIT_S):
        while pod.asked["/v1/round-trip"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert pod.bodies[-1] == {"revision": "new"}


async def test_nothing_is_tried_without_a_proxy_of_the_revision(asking: Asking, pod: AdminPort) -> None:
    assert asking.prober.ask(KEY, ask(prove="rev")) is None


async def test_a_revision_that_an_earlier_operator_saw_serve_is_not_tried(
    asking: Asking, pod: AdminPort
) -> None:
    asking.prober.remember_proven(KEY, "rev")
    assert asking.prober.ask(KEY, ask(prove="rev", provers={"p": pod.address})) is None
    assert asking.prober.reports(KEY).proven == {"rev"}


async def test_attainment_is_the_sum_of_what_all_proxies_counted_in_the_last_hour(
    asking: Asking, pod: AdminPort, other: AdminPort
) -> None:
    pod.attainment = {"classes": {"chat": window(90, 10), "document": window(1, 0)}}
    other.attainment = {"classes": {"chat": window(5, 5)}}
    wanted = ask(proxies={"a": pod.address, "b": other.address})
    reports = await asking.once(wanted)
    assert reports.attainment == {"chat": (95, 15), "document": (1, 0)}
    again_s = asking.prober.ask(KEY, wanted)
    assert again_s is not None
    assert math.isclose(again_s, ATTAINMENT_EVERY_S, abs_tol=5.0)
    assert pod.asked["/v1/attainment"] == 1


async def test_attainment_without_one_of_two_proxies_is_that_of_the_other_and_without_any_absent(
    asking: Asking, pod: AdminPort
) -> None:
    pod.attainment = {"classes": {"chat": window(3, 1)}}
    reports = await asking.once(ask(proxies={"a": pod.address, "b": NOBODY}))
    assert reports.attainment == {"chat": (3, 1)}
    asking.prober.ask(KEY, ask())
    assert asking.prober.reports(KEY).attainment is None
    asking.prober.forget(KEY)
    assert (await asking.once(ask(proxies={"b": NOBODY}))).attainment is None


async def test_one_question_at_a_time_is_under_way_for_a_service(asking: Asking, pod: AdminPort) -> None:
    pod.config = None
    for _ in range(20):
        asking.prober.ask(KEY, ask(pods={"a": pod.address}, generation=1))
        await asyncio.sleep(0.005)
    assert pod.asked["/v1/config"] == 1


async def test_a_first_question_is_new_until_it_is_answered(asking: Asking, pod: AdminPort) -> None:
    assert not asking.prober.is_new(KEY)
    wanted = ask(pods={"a": pod.address}, generation=1)
    asking.prober.ask(KEY, wanted)
    assert asking.prober.is_new(KEY)
    assert (await asking.once(wanted)).generations == {"a": 1}
    assert not asking.prober.is_new(KEY)


async def test_a_service_that_is_gone_is_forgotten_with_its_questions(asking: Asking, pod: AdminPort) -> None:
    pod.config = None
    asking.prober.ask(KEY, ask(pods={"a": pod.address}, generation=1))
    task = asking.prober._known[KEY].task
    assert task is not None
    asking.prober.forget(KEY)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asking.prober.reports(KEY) == Reports()
    assert asking.told.empty()
