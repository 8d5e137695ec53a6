"""The preemptive loop on a real engine core in this process; a test is its clients."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowprefill.clock import MonotonicClock
from flowprefill.scheduling.actions import Action, Preempt
from flowprefill.scheduling.events import Event, Parked
from flowprefill.scheduling.predictor import Predictor
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.snapshot import SchedulerSnapshot
from flowprefill.server.settings import scheduler_settings
from flowprefill.server.vllm.core_settings import DEFAULT_LIVE
from flowprefill.server.vllm.loop import PreemptiveLoop, within_slots
from flowprefill_crd import LiveConfig
from support.vllm.bench import Bench, Member
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.request import Request

COEFFICIENTS = (1e-3, 2e-5, 1e-9, 1e-9)
"""Of the predictor: about what the generated models take here."""


@dataclass(slots=True)
class Heard:
    """What a client got for one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    token_times_s: list[float] = field(default_factory=list)


class LoopBench:
    """Runs the loop in a thread. `heard` is what clients got, by request."""

    def __init__(self, bench: Bench, live: LiveConfig = DEFAULT_LIVE) -> None:
        self.bench = bench
        self.heard: dict[str, Heard] = {}
        self.decisions: list[tuple[Event, Sequence[Action]]] = []
        self.steps: dict[int, tuple[Member, ...]] = {}
        self.seen: list[SchedulerSnapshot] = []
        self.error: BaseException | None = None
        core = self._core = _as_process(bench.core)
        self._changed = threading.Condition()
        bench.watch_points(False)
        self._record_steps()
        bench.bridge._emit = lambda outputs: [core.output_queue.put_nowait(o) for o in outputs.items()]
        self.scheduler = Scheduler(
            within_slots(scheduler_settings(live), bench.num_slots), bench.bridge.kv, Predictor(COEFFICIENTS)
        )
        self.loop = PreemptiveLoop(
            core,
            bench.loop_pool(),
            self.scheduler,
            bench.bridge,
            live,
            MonotonicClock(),
            num_slots=bench.num_slots,
            heard=lambda event, actions, now_s, round_s: self.decisions.append((event, actions)),
            seen=lambda snapshot, cached_prefixes: self.seen.append(snapshot),
        )
        bench.current_task = self._advancing
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="client", daemon=True)

    def __enter__(self) -> LoopBench:
        self._thread.start()
        self._listener.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._core.shutdown_state = EngineShutdownState.REQUESTED
        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self._thread.join(self.bench.wait_s)
        assert not self._thread.is_alive(), "the loop did not end"
        self._core.output_queue.put_nowait(None)
        self._listener.join(self.bench.wait_s)
        self._restore()
        if self.error is not None:
            raise self.error

    def send(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 1, **xargs: Any) -> None:
        """A client's request, with `vllm_xargs`."""
        self.heard[request_id] = Heard()
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=xargs or None
            ),
            pooling_params=None,
            arrival_time=time.time(),
            block_hasher=self._core.request_block_hasher,
        )
        self._core.input_queue.put_nowait((EngineCoreRequestType.ADD, (request, 0)))

    def leave(self, *request_ids: str) -> None:
        """Clients go away."""
        self._core.input_queue.put_nowait((EngineCoreRequestType.ABORT, list(request_ids)))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until clients have heard enough."""
        deadline = time.monotonic() + self.bench.wait_s
        with self._changed:
            while not condition():
                assert self.error is None, self.error
                left = deadline - time.monotonic()
                assert left > 0, f"{what}: {self.state()}"
                self._changed.wait(min(left, 0.05))

    def until_finished(self, *request_ids: str) -> None:
        wanted = request_ids or tuple(self.heard)
        self.until(lambda: all(self.heard[i].finish_reason for i in wanted), "all have finished")

    @property
    def num_preemptions(self) -> int:
        return sum(isinstance(event, Parked) for event, _ in self.decisions)

    @property
    def num_requested(self) -> int:
        return sum(isinstance(action, Preempt) for _, actions in self.decisions for action in actions)

    def state(self) -> Mapping[str, object]:
        """For a failure's message."""
        return {
            "unfinished": [i for i, heard in self.heard.items() if heard.finish_reason is None],
            "left over": self.bench.left_over(),
            "snapshot": self.scheduler.snapshot(time.monotonic()),
        }

    # Inside.

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def _listen(self) -> None:
        while (message := self._core.output_queue.get()) is not None:
            _, outputs = message
            with self._changed:
                for output in outputs.outputs:
                    heard = self.heard[output.request_id]
                    heard.tokens += output.new_token_ids
                    heard.token_times_s += [time.monotonic()] * len(output.new_token_ids)
                    if heard.finish_reason is not None:
                        self.error = AssertionError(
                            f"{output.request_id} is heard of after its end: {output}"
                        )
                    if output.finish_reason is not None:
                        heard.finish_reason = str(output.finish_reason)
                self._changed.notify_all()

    def _record_steps(self) -> None:
        bench, bridge = self.bench, self.bench.bridge
        self._begin, self._end = bridge.begin, bridge.end
        begin, end = bridge.begin, bridge.end

        def begin_recorded(task_id: int, ends: Mapping[str, int]) -> Any:
            begun = begin(task_id, ends)
            if begun.step is not None:
                scheduled = begun.step.output.num_scheduled_tokens
                requests = bench.vllm.requests
                self.steps[task_id] = tuple(
                    Member(
                        request_id=i,
                        start=requests[i].num_computed_tokens - scheduled[i],
                        end=requests[i].num_computed_tokens,
                    )
                    for i in scheduled
                )
            return begun

        def end_recorded(task_id: int, result: Any) -> Any:
            members = self.steps[task_id]
            bench.records.append(bench.computed(task_id, members))
            bench.started.append(members)
            return end(task_id, result)

        bridge.begin, bridge.end = begin_recorded, end_recorded

    def _advancing(self) -> int | None:
        progress = self.loop._pool.progress()
        return None if progress is None else progress.task_id

    def _restore(self) -> None:
        """The bench as it was; its steps in the order in which they began."""
        bench = self.bench
        bench.bridge.begin, bench.bridge.end = self._begin, self._end
        bench.bridge._emit = bench._emitted
        bench.vllm.observer = None
        bench.watch_points(True)
        bench.current_task = bench._task_of_script
        done = set(bench.started)
        bench.started[:] = [members for members in self.steps.values() if members in done]
        bench.outputs.update({i: heard.tokens for i, heard in self.heard.items()})


def _as_process(core: Any) -> Any:
    """The engine core with what the class with queues adds, but for sockets."""
    core.__class__ = EngineCoreProc
    core.input_queue, core.output_queue = queue.Queue(), queue.Queue()
    core.engines_running = False
    core.shutdown_state = EngineShutdownState.RUNNING
    return core
