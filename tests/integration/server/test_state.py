"""The state stream: a line at every change, one at least every two seconds, to everybody who listens."""

from __future__ import annotations

import asyncio
from pathlib import Path

from flowprefill.engines.simulated.presets import preset
from flowprefill.scheduling.kv import prefix_hashes
from flowprefill.server.state import StateHub
from flowprefill.wire import PodState
from support.pods import prefill_leg, prefilled, running_pair, running_pod, simulated_engine, until


class Watcher:
    """Reads a pod's state stream in the background."""

    def __init__(self, pod: object) -> None:
        self.states: list[PodState] = []
        self._pod = pod
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async with self._pod.admin.stream("GET", "/v1/state") as answer:  # type: ignore[attr-defined]
            assert answer.headers["content-type"] == "application/x-ndjson"
            async for line in answer.aiter_lines():
                self.states.append(PodState.model_validate_json(line))

    @property
    def last(self) -> PodState | None:
        return self.states[-1] if self.states else None

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_watcher_sees_a_prefill_come_and_go(tmp_path: Path) -> None:
    slow = simulated_engine(cost=preset("tiny").scaled(20.0))
    async with running_pod("prefill", tmp_path, engine=slow) as pod:
        watcher = Watcher(pod)
        await until(lambda: bool(watcher.states), what="a first line at once")
        first = watcher.states[0]
        assert (first.role, first.revision, first.ready, first.generation) == ("prefill", "r1", True, 1)
        assert (first.kv_blocks, first.kv_blocks_free, first.block_size) == (512, 512, 16)
        prompt = [3] * 100
        xargs = {"ttft_slo": 30.0, "ttft_target": 40.0}
        await prefilled(pod, prompt, vllm_xargs=xargs)
        await until(lambda: any(s.running for s in watcher.states), what="running was seen")
        running = next(s.running for s in watcher.states if s.running)
        assert running.num_tokens == 100
        assert 0 < running.deadline_in_s <= 30.0
        assert running.feasible
        hashes = prefix_hashes(prompt, 16)
        await until(
            lambda: watcher.last is not None and set(watcher.last.cached_prefixes) == set(hashes),
            what="cached prefixes",
        )
        assert watcher.last is not None
        assert watcher.last.running is None
        assert watcher.last.kv_blocks_free == 512 - 7
        assert watcher.last.prediction is not None
        numbers = [s.sequence for s in watcher.states]
        assert numbers == sorted(set(numbers))
        await watcher.stop()


async def test_two_watchers_see_the_same_end_and_a_stop_ends_their_streams(tmp_path: Path) -> None:
    async with running_pod("prefill", tmp_path) as pod:
        watchers = [Watcher(pod), Watcher(pod)]
        await pod.api.post("/v1/completions", json=prefill_leg("hello there"))
        await until(
            lambda: all(w.last is not None and w.last.kv_blocks_free == 511 for w in watchers),
            what="both saw it",
        )
        pod.server.stop()
        await until(lambda: all(w.last is not None and w.last.draining for w in watchers), what="draining")
        assert not any(w.last is not None and w.last.ready for w in watchers)
    await asyncio.gather(*(w._task for w in watchers))


async def test_a_decode_pod_tells_its_room(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (_, d):
        watcher = Watcher(d)
        await until(lambda: bool(watcher.states))
        assert watcher.states[0].role == "decode"
        assert watcher.states[0].kv_blocks_free == 512
        await watcher.stop()


async def test_a_hub_beats_without_changes_and_shares_lines_between_close_changes() -> None:
    hub = StateHub(
        lambda sequence: PodState(sequence=sequence, role="prefill", revision="r", ready=True),
        heartbeat_s=0.01,
    )
    lines = hub.lines()
    sequences = [PodState.model_validate_json(await anext(lines)).sequence for _ in range(3)]
    assert sequences == [1, 2, 3]
    for _ in range(100):
        hub.changed()
    assert PodState.model_validate_json(await anext(lines)).sequence == 4
    hub.close()
    assert [line async for line in lines] == []
