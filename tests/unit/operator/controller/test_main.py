"""The operator as a whole: how it starts and ends."""

from __future__ import annotations

import asyncio
import os
import signal
from types import FrameType

import pytest
from kubernetes.aio.client import Configuration

from flowprefill_operator.cluster.connect import Credentials
from flowprefill_operator.config import OperatorConfig
from flowprefill_operator.controller import main


@pytest.mark.timeout(60)
def test_a_signal_before_there_is_a_lease_ends_it_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    unhandled: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        unhandled.append(number)

    async def signalled() -> Credentials:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        return Credentials(configuration=Configuration(host="http://127.0.0.1:1"), namespace="ns")

    monkeypatch.setattr(main, "credentials", signalled)
    before = signal.signal(signal.SIGTERM, handle)
    try:
        assert main.run(OperatorConfig(port=0)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert unhandled == []
