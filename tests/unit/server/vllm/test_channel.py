"""What the engine core and its parent tell each other. Both ends run here, in threads and over a real socket."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flowprefill.request import Request
from flowprefill.scheduling.actions import Finish
from flowprefill.scheduling.events import Arrival, Tick
from flowprefill.server.settings import scheduler_settings
from flowprefill.server.vllm.channel import CoreChannel, Decided, Reconfigure, Seen, Started
from flowprefill.server.vllm.listening_end import ParentChannel
from flowprefill.server.vllm.preparing import PrivateFiles
from support.pods import live_config, until
from support.vllm_core import SPEC, profile, snapshot


class Parent:
    """A parent's end, and what it heard."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.connected = 0
        self.lost = 0
        self.files = PrivateFiles()
        self.channel = ParentChannel(
            self.files.socket, self.heard.append, on_connected=self._connected, on_loss=self._lost
        )

    def _connected(self) -> None:
        self.connected += 1

    def _lost(self, num_lost: int) -> None:
        self.lost += num_lost

    def core(self, heard: Any = lambda message: None, **changes: Any) -> CoreChannel:
        return CoreChannel(self.channel.address, heard, key=bytes.fromhex(self.channel.key), **changes)


@asynccontextmanager
async def parent() -> AsyncIterator[Parent]:
    end = Parent()
    try:
        yield end
    finally:
        await end.channel.close()
        assert not end.files.socket.exists()
        end.files.close()


def decided(number: int) -> Decided:
    return Decided(event=Tick(), actions=(Finish(request_id=str(number), outcome="completed"),), now_s=number)


def reconfigure(generation: int) -> Reconfigure:
    live = live_config(generation=generation)
    return Reconfigure(live=live, settings=scheduler_settings(live), tbt_slo_s=0.1)


async def test_the_parent_hears_messages_whole_and_decisions_in_order() -> None:
    async with parent() as end:
        core = end.core()
        core.send(Started(spec=SPEC, profile=profile()))
        for number in range(100):
            core.send(decided(number))
        await until(lambda: len(end.heard) == 101)
        assert end.heard[0] == Started(spec=SPEC, profile=profile())
        assert end.heard[1:] == [decided(number) for number in range(100)]
        assert end.connected == 1
        await asyncio.to_thread(core.close)


async def test_requests_travel_without_their_prefix_hashes() -> None:
    request = Request(
        request_id="r",
        num_prompt_tokens=64,
        arrival_s=1.0,
        deadline_s=2.0,
        ttft_slo_s=1.0,
        prefix_hashes=(1, 2),
    )
    async with parent() as end:
        core = end.core()
        core.send(Decided(event=Arrival(requests=(request,)), actions=(), now_s=1.0, round_s=0.25))
        await until(lambda: bool(end.heard))
        (heard,) = end.heard
        assert heard.event.requests[0].prefix_hashes == ()
        assert heard.event.requests[0].num_prompt_tokens == 64
        assert heard.round_s == 0.25
        assert request.prefix_hashes == (1, 2), "the core's own request is as it was"
        await asyncio.to_thread(core.close)


async def test_a_core_hears_the_latest_settings_also_those_from_before_it_came() -> None:
    async with parent() as end:
        end.channel.send(reconfigure(1))
        end.channel.send(reconfigure(2))
        heard: list[Any] = []
        core = end.core(heard.append)
        await until(lambda: heard == [reconfigure(2)])
        end.channel.send(reconfigure(3))
        await until(lambda: heard == [reconfigure(2), reconfigure(3)])
        await asyncio.to_thread(core.close)
        again: list[Any] = []
        second = end.core(again.append)
        await until(lambda: again == [reconfigure(3)])
        assert end.connected == 2
        await asyncio.to_thread(second.close)


async def test_a_core_that_is_not_read_from_drops_the_oldest_decisions_and_the_parent_is_told_how_many() -> (
    None
):
    async with parent() as end:
        core = end.core(limit=10)
        await until(lambda: end.connected == 1)
        # The event loop stands still: messages fill first the parent's bound, then the socket, then the core's queue.
        core.send(Started(spec=SPEC, profile=None))
        began_s = time.monotonic()
        number = 0
        while core.num_lost < 50 and number < 1_000_000:
            core.send(decided(number))
            number += 1
        assert core.num_lost >= 50
        assert time.monotonic() - began_s < 60, "sending never waits for the parent"
        await until(lambda: bool(end.heard) and end.heard[-1] == decided(number - 1))
        assert end.heard[0] == Started(spec=SPEC, profile=None)
        heard = [message.now_s for message in end.heard[1:]]
        assert heard == sorted(heard)
        assert number - len(heard) == core.num_lost == end.lost
        await asyncio.to_thread(core.close)


async def test_of_states_only_the_newest_waits() -> None:
    async with parent() as end:
        core = end.core()
        await until(lambda: end.connected == 1)
        number = 0
        while not core.num_superseded:  # the writer may take one between two sends
            number += 1
            core.send(Seen(snapshot=snapshot(now_s=float(number)), cached_prefixes=(number,)))
        await until(lambda: bool(end.heard) and end.heard[-1].cached_prefixes == (number,))
        assert len(end.heard) == number - core.num_superseded
        await asyncio.to_thread(core.close)


async def test_without_a_parent_sending_does_nothing() -> None:
    core = CoreChannel(None, lambda message: None)
    core.send(decided(1))
    assert core.ended
    core.close()


async def test_a_parent_that_is_not_there_or_dies_ends_the_channel_and_nothing_else() -> None:
    missing = CoreChannel("/nonexistent/socket", lambda message: None, key=b"k")
    await until(lambda: missing.ended)
    missing.send(decided(1))
    async with parent() as end:
        core = end.core()
        await until(lambda: end.connected == 1)
    await until(lambda: core.ended)
    core.send(decided(2))
    for channel in (core, missing):
        await asyncio.to_thread(channel.close)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("channel")]


async def test_a_visitor_without_the_key_is_not_heard() -> None:
    async with parent() as end:
        stranger = CoreChannel(end.channel.address, lambda message: None, key=b"another key")
        stranger.send(decided(1))
        await until(lambda: stranger.ended)
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(end.channel.address)
        silent.close()
        core = end.core()
        core.send(decided(2))
        await until(lambda: bool(end.heard))
        assert end.heard == [decided(2)]
        await asyncio.to_thread(core.close)


async def test_a_listener_that_raises_keeps_hearing() -> None:
    heard: list[Any] = []

    def listen(message: Reconfigure) -> None:
        heard.append(message.live.generation)
        if message.live.generation == 1:
            raise ValueError("not this one")

    async with parent() as end:
        core = end.core(listen)
        end.channel.send(reconfigure(1))
        await until(lambda: heard == [1])
        end.channel.send(reconfigure(2))
        await until(lambda: heard == [1, 2])
        assert not core.ended
        await asyncio.to_thread(core.close)


def test_the_cores_end_needs_neither_torch_nor_vllm_nor_a_web_framework() -> None:
    code = (
        "import sys, flowprefill.server.vllm.channel; "
        "print([name for name in ('torch', 'vllm', 'fastapi', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
