"""kopf's thread: it begins anew when kopf fails, and is over when watching is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import kopf
import pytest

from flowprefill_operator.controller import watching
from flowprefill_operator.controller.watching import Watches


class FailingOnce:
    """Stands in for `kopf.operator`: the first run fails, the next lasts until it is told to stop."""

    def __init__(self) -> None:
        self.runs = 0
        self.watching = threading.Event()
        self.told_to_stop = False

    async def __call__(self, *, stop_flag: asyncio.Event, **_: Any) -> None:
        self.runs += 1
        if self.runs == 1:
            raise RuntimeError("an error in the watch-stream")
        self.watching.set()
        await stop_flag.wait()
        self.told_to_stop = True


async def test_watches_that_fail_begin_anew_and_end_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = FailingOnce()
    monkeypatch.setattr(kopf, "operator", stand_in)
    monkeypatch.setattr(watching, "PAUSE_S", 0.01)
    task = asyncio.create_task(Watches(kopf.OperatorRegistry(), ()).run())
    assert await asyncio.to_thread(stand_in.watching.wait, 10.0)
    assert stand_in.runs == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stand_in.told_to_stop
    assert stand_in.runs == 2
