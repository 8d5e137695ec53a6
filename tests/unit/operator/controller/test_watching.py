"""kopf's thread: it begins anew when kopf fails, and is over when watching is."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import kopf
import pytest

from flowprefill_operator.controller import watching
from flowprefill_operator.controller.watching import Watches


class FailingOnce:
    """Stands in for `kopf.operator`: the first run fails, the next lasts until it is told to stop."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.runs = 0
        self.watching = threading.Event()
        self.told_to_stop = False

    async def __call__(self, *, stop_flag: asyncio.Event, **_: Any) -> None:
        self.runs += 1
        if self.runs == 1:
            raise self.error
        self.watching.set()
        await stop_flag.wait()
        self.told_to_stop = True


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("404 page not found"), "RuntimeError: 404 page not found"),
        (kopf.LoginError("Ran out of it"), "the API server does not accept the operator's credentials"),
        (RuntimeError("x" * 9000), f"RuntimeError: {'x' * 286}"),
    ],
)
async def test_watches_that_fail_begin_anew_after_one_line_in_the_log_and_end_with_the_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    caplog.set_level(logging.INFO, logger="flowprefill_operator.controller.watching")
    stand_in = FailingOnce(error)
    monkeypatch.setattr(kopf, "operator", stand_in)
    monkeypatch.setattr(watching, "PAUSE_S", 0.01)
    ends: list[str] = []
    watches = Watches(kopf.OperatorRegistry(), (), ended=lambda: ends.append("ended"))
    task = asyncio.create_task(watches.run())
    assert await asyncio.to_thread(stand_in.watching.wait, 10.0)
    assert stand_in.runs == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stand_in.told_to_stop
    assert stand_in.runs == 2
    (record,) = [r for r in caplog.records if r.name == watching.__name__]
    assert vars(record)["reason"] == reason
    assert not record.exc_info
    assert ends == ["ended"]


async def test_watches_that_are_told_to_begin_anew_do_so_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = FailingOnce(RuntimeError())
    stand_in.runs = 1
    monkeypatch.setattr(kopf, "operator", stand_in)
    monkeypatch.setattr(watching, "PAUSE_S", 0.01)
    ends: list[str] = []
    watches = Watches(kopf.OperatorRegistry(), (), ended=lambda: ends.append("ended"))
    watches.begin_anew()  # before it began, there is nothing to end
    task = asyncio.create_task(watches.run())
    for runs in (2, 3):
        assert await asyncio.to_thread(stand_in.watching.wait, 10.0)
        assert stand_in.runs == runs
        stand_in.watching.clear()
        watches.begin_anew()
    assert await asyncio.to_thread(stand_in.watching.wait, 10.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends == []
    assert [r for r in caplog.records if r.name == watching.__name__] == []
