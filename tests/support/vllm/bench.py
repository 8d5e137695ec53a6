"""vLLM's engine core in this process, with steps started, paused and resumed at points of a test's choice.

Runs in vLLM's environment. Real executor, worker, runners, scheduler and model; only the loop that decides is the test's script. Every
step is recorded with what it computed (digests of logits and of the KV blocks that it filled), so that a run with pauses can be
compared bit by bit with one without.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowprefill.clock import MonotonicClock
from flowprefill.engines.vllm_engine.scheduler import AllocatingScheduler
from flowprefill.engines.vllm_engine.steps import StepEngine
from flowprefill.execution.pool import TaskPool
from flowprefill.scheduling.actions import Granularity, Task, TaskItem
from flowprefill.scheduling.events import Completed, Failed, Parked
from flowprefill.server.vllm.bridge import StepBridge
from flowprefill.server.vllm.step_pool import StepPool, StepRunner
from support.vllm.digests import digest
from vllm import forward_context
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request, RequestStatus

PACKAGE = "flowprefill.engines.vllm_engine"
WAIT_S = 25.0
"""How long an engine in this process may take for anything that a test waits for."""

Ended = Completed | Failed | Parked


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One request's part of a step: tokens `[start, end)`, of which those before `start` were in place."""

    request_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step was, and what it computed."""

    members: tuple[Member, ...]
    logits: Mapping[str, str]
    kv: Mapping[str, str]


@dataclass(slots=True)
class Flight:
    """A step under way."""

    task_id: int
    members: tuple[Member, ...]
    points: int = 0
    record: StepRecord | None = None
    pause_at: int | None = None
    tickets: int = 0


def engine_core(model: Path, *, settings: Mapping[str, Any], **engine_args: Any) -> EngineCore:
    """vLLM's engine core on this model with our classes, in float32 on one thread, without serving processes."""
    args = EngineArgs(
        model=str(model),
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 32,
            "num_gpu_blocks_override": 400,
            "block_size": 32,
            "async_scheduling": False,
            "scheduler_cls": f"{PACKAGE}.scheduler.AllocatingScheduler",
            "worker_cls": f"{PACKAGE}.worker.PreemptiveWorker",
            "distributed_executor_backend": f"{PACKAGE}.executor.InProcessExecutor",
            "additional_config": {"flowprefill": dict(settings)},
            **engine_args,
        },
    )
    config = args.create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=False)


class Bench:
    """Plays steps on an engine core. Methods return once the engine has answered."""

    def __init__(self, core: EngineCore, *, watch_logits: bool = True) -> None:
        """Without `watch_logits` no digests of logits are taken, which cost time."""
        self.core = core
        scheduler = core.scheduler
        assert isinstance(scheduler, AllocatingScheduler)
        self.vllm = scheduler
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.records: list[StepRecord] = []
        self.started: list[tuple[Member, ...]] = []  # in the order of starting
        self._events: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._flights: dict[int, Flight] = {}
        self._running: Flight | None = None
        self.current_task: Callable[[], int | None] = self._task_of_script
        self.logits: dict[int, dict[str, str]] = {}  # by task, by request
        self.wait_s = WAIT_S
        self._next_id = 0
        self._digests = watch_logits
        self._build()
        self.bridge = StepBridge(scheduler, self.runner, self._emitted)
        self._free_before = self.num_free_blocks

    def _build(self) -> None:
        """The worker, and the pool over it."""
        self.worker: Any = self.core.model_executor.preemptive_worker
        self.engine = StepEngine(self.worker, self.worker.thread_context)
        self.runner: StepRunner = self.engine
        self._pool: StepPool = TaskPool(self.engine, MonotonicClock(), self._events.put, skip_cancelled=False)
        self.worker.stage.housekeeping = self._at_point
        if self._digests:
            self._watch_logits()

    # Requests.

    def add(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 1, **params: Any) -> None:
        """A request waits."""
        self.vllm.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(
                    max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params
                ),
                pooling_params=None,
                block_hasher=self.core.request_block_hasher,
            )
        )
        self.outputs[request_id] = []

    def abort(self, *request_ids: str) -> None:
        """The client has gone."""
        self.vllm.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    # Steps.

    def start(
        self,
        *request_ids: str,
        tokens: int | None = None,
        pause_at: int | None = None,
        granularity: Granularity = "operator",
    ) -> Flight:
        """Start a step over these requests, `tokens` of each or all that are left; return at its pause or end."""
        requests = [self.vllm.requests[i] for i in request_ids]
        ends = {
            r.request_id: r.num_tokens
            if tokens is None
            else min(r.num_computed_tokens + tokens, r.num_tokens)
            for r in requests
        }
        return self.start_ends(ends, pause_at=pause_at, granularity=granularity)

    def start_ends(
        self, ends: Mapping[str, int], *, pause_at: int | None = None, granularity: Granularity = "operator"
    ) -> Flight:
        flight = self._launch(ends, pause_at, granularity)
        self._await(flight)
        return flight

    def launch(self, *request_ids: str, granularity: Granularity = "operator") -> Flight:
        """Start a step over these requests, whole, and return at once."""
        ends = {i: self.vllm.requests[i].num_tokens for i in request_ids}
        return self._launch(ends, None, granularity)

    def pause(self, flight: Flight) -> bool:
        """Ask a running step to pause, and wait until it stands; False when it ended first."""
        flight.tickets += 1
        self._pool.preempt(flight.task_id, flight.tickets)
        self._await(flight)
        return flight.task_id in self._flights

    def go_on(self, flight: Flight) -> None:
        """Let a paused step run, and return at once."""
        self._running = flight
        self._pool.resume(flight.task_id)

    def wait(self, flight: Flight, seconds: float | None) -> bool:
        """Let a running step run for so long, or to its end; whether it has ended."""
        if flight.task_id in self._flights:
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=seconds))
        return flight.task_id not in self._flights

    def _launch(self, ends: Mapping[str, int], pause_at: int | None, granularity: Granularity) -> Flight:
        task_id, self._next_id = self._next_id, self._next_id + 1
        begun = self.bridge.begin(task_id, ends)
        assert begun.step is not None, f"vLLM took none of {sorted(ends)}"
        assert not begun.left_out, f"vLLM left out {begun.left_out}"
        scheduled = begun.step.output.num_scheduled_tokens
        members = tuple(
            Member(
                request_id=i,
                start=self.vllm.requests[i].num_computed_tokens - scheduled[i],
                end=self.vllm.requests[i].num_computed_tokens,
            )
            for i in scheduled
        )
        flight = Flight(task_id=task_id, members=members, pause_at=pause_at)
        self._flights[task_id] = self._running = flight
        self.started.append(members)
        items = tuple(
            TaskItem(
                request_id=m.request_id,
                start=m.start,
                num_tokens=m.end - m.start,
                block_ids=(),
                completes=True,
            )
            for m in members
        )
        task = Task(task_id=task_id, items=items, predicted_s=0.0, granularity=granularity)
        self._expect(flight)
        self._pool.submit(task, [begun.step])
        return flight

    def may_overtake(self, point: int, granularity: Granularity) -> bool:
        """Whether a step that is asked to pause at this point may end instead."""
        return False

    def resume(self, flight: Flight, *, pause_at: int | None = None) -> Flight:
        """Let a paused step go on to its next pause or its end."""
        flight.pause_at = pause_at
        self._running = flight
        self._expect(flight)
        self._pool.resume(flight.task_id)
        self._await(flight)
        return flight

    def unwind(self, flight: Flight) -> None:
        """End a paused step where it stands; its requests are as before."""
        self._pool.cancel(flight.task_id)
        self._await(flight)

    def unwind_while(self, flight: Flight, other: Flight) -> None:
        """Unwind a paused step while another advances."""
        self._running = other
        self._expect(other)
        self._pool.resume(other.task_id)
        self._pool.cancel(flight.task_id)
        self._await(other)

    def begin_test(self) -> None:
        """Forget what was; the engine must be empty."""
        assert not self.vllm.requests, f"requests of before: {list(self.vllm.requests)}"
        self.vllm.reset_prefix_cache()
        self.outputs.clear()
        self.finished.clear()
        self.records.clear()
        self.logits.clear()
        self.started.clear()
        self._free_before = self.num_free_blocks

    def left_over(self) -> dict[str, object]:
        """What should not be there with nothing to do; empty when all is well."""
        found: dict[str, object] = {
            "requests": list(self.vllm.requests),
            "in flight": dict(self.vllm.in_flight),
            "blocks": self._free_before - self.num_free_blocks,
            "promised": self.bridge.kv.num_blocks - self.bridge.kv.num_free,
            **self._left_over_here(),
        }
        return {name: value for name, value in found.items() if value}

    def _left_over_here(self) -> dict[str, object]:
        stage = self.worker.stage
        return {
            "slots": len(self.worker.slots.all) - self.worker.slots.num_free,
            "known to runners": self.worker.slots.num_requests,
            "stint": stage.stint,
            "forward context": forward_context._forward_context,
        }

    def same_without_pauses(self, prompts: Mapping[str, Sequence[int]], **params: Any) -> None:
        """Run the same steps again without a pause, and compare what each computed and every token."""
        outputs = {name: list(tokens) for name, tokens in self.outputs.items()}
        records = self._computed(self.records)
        started = list(self.started)
        self.abort(*list(self.vllm.requests))
        self.flush()
        self.begin_test()
        again = self._replay(started, prompts, **params)
        assert self._computed(again) == records
        shared = outputs.keys() & self.outputs.keys()
        # Who left in the middle of a step did not hear of its token.
        assert {i: self.outputs[i][: len(outputs[i])] for i in shared} == {i: outputs[i] for i in shared}

    @staticmethod
    def _computed(records: Sequence[StepRecord]) -> dict[tuple[Member, int], tuple[str | None, str | None]]:
        """Digests by member; equal members are told apart by how often their step came."""
        return {
            (member, n): (record.logits.get(member.request_id), record.kv.get(member.request_id))
            for record, n in _numbered(records)
            for member in record.members
        }

    def _replay(
        self, steps: Sequence[tuple[Member, ...]], prompts: Mapping[str, Sequence[int]], **params: Any
    ) -> list[StepRecord]:
        """Recorded steps in the order in which they started, each without a pause."""
        first: dict[str, int] = {}
        for members in steps:
            for member in members:
                first.setdefault(member.request_id, member.start)
        last = {member.request_id: number for number, members in enumerate(steps) for member in members}
        done = []
        with recorded_hits(self, first):
            for request_id, prompt in prompts.items():
                self.add(request_id, prompt, **params)
            for number, members in enumerate(steps):
                known = [m for m in members if m.request_id in prompts]
                if not known:
                    continue
                record = self.start_ends({m.request_id: m.end for m in known}).record
                assert record is not None
                assert set(record.members) == set(known), (record.members, known)
                done.append(record)
                self.abort(*(m.request_id for m in known if last[m.request_id] == number))  # it had left
        return done

    @contextmanager
    def failing_at(self, point: int, reason: str) -> Iterator[None]:
        """Inside, the step that runs raises at this point."""

        def fail() -> None:
            self._at_point()
            stint = self.worker.stage.stint
            if stint is not None and stint.index - 1 == point:
                raise RuntimeError(reason)

        self.worker.stage.housekeeping = fail
        try:
            yield
        finally:
            self.worker.stage.housekeeping = self._at_point

    @property
    def num_slots(self) -> int:
        return len(self.worker.slots.all)

    @property
    def num_free_blocks(self) -> int:
        return int(self.vllm.kv_cache_manager.block_pool.get_num_free_blocks())

    def loop_pool(self) -> StepPool:
        """A pool for a loop, which closes it."""
        return TaskPool(self.engine, MonotonicClock(), skip_cancelled=False)

    def watch_points(self, watched: bool) -> None:
        """Whether pauses come where tests say."""
        self.worker.stage.housekeeping = self._at_point if watched else None

    def flush(self) -> None:
        """Tell the workers of finished requests."""
        self.bridge.empty_step()

    def close(self) -> None:
        self._pool.close()

    # Inside.

    def _task_of_script(self) -> int | None:
        return None if self._running is None else self._running.task_id

    def _at_point(self) -> None:
        """Called at every point, in the step's thread, before the gate is looked at."""
        flight, stint = self._running, self.worker.stage.stint
        if flight is None or stint is None:
            return
        flight.points = stint.index
        if flight.pause_at is not None and stint.index - 1 == flight.pause_at:
            flight.pause_at = None
            flight.tickets += 1
            self._pool.preempt(flight.task_id, flight.tickets)

    def _await(self, flight: Flight) -> None:
        """Handle events until this step has paused or ended."""
        while self._take(self._events.get(timeout=self.wait_s)) is not flight:
            pass

    def _take(self, event: Ended) -> Flight:
        found = self._flights[event.task_id]
        match event:
            case Parked():
                pass
            case Completed():
                self._completed(found)
            case Failed(error=error):
                self.bridge.end_early(found.task_id)
                del self._flights[found.task_id]
                if error is not None:
                    raise AssertionError(error)
        return found

    def _completed(self, flight: Flight) -> None:
        del self._flights[flight.task_id]
        (result,) = self._pool.take_results(flight.task_id)
        flight.record = self.computed(flight.task_id, flight.members)
        self.records.append(flight.record)
        self.bridge.end(flight.task_id, result)

    def _expect(self, flight: Flight) -> None:
        """This step advances next."""

    def computed(self, task_id: int, members: tuple[Member, ...]) -> StepRecord:
        """What a step has computed. Once."""
        kv = {
            m.request_id: self._kv_digest(m)
            for m in members
            if self._digests and m.request_id in self.vllm.requests
        }
        return StepRecord(members=members, logits=self.logits.pop(task_id, {}), kv=kv)

    def _full_blocks(self, member: Member) -> Sequence[int]:
        """Blocks that are full up to the member's end."""
        (block_ids,) = self.vllm.kv_cache_manager.get_block_ids(member.request_id)
        full: Sequence[int] = block_ids[: member.end // self.vllm.block_size]
        return full

    def _kv_digest(self, member: Member) -> str:
        """Of all full blocks up to the member's end, in every layer."""
        found = hashlib.sha256()
        for layer in self.worker._first_runner.kv_caches:
            for block_id in self._full_blocks(member):
                found.update(layer[block_id].contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def _watch_logits(self) -> None:
        model = self.worker._first_runner.get_model()
        compute = model.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            task_id = self.current_task()
            if task_id is not None:
                names = self.worker.model_runner.input_batch.req_ids
                assert len(names) == len(logits), "a row for each request"
                found = {n: digest(row) for n, row in zip(names, logits, strict=True)}
                self.logits.setdefault(task_id, {}).update(found)
            return logits

        model.compute_logits = watched

    def _emitted(self, outputs: Any) -> None:
        for by_client in outputs.values():
            for output in by_client.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)


@contextmanager
def recorded_hits(bench: Bench, hits: Mapping[str, int]) -> Iterator[None]:
    """Inside, a request finds no more of its prefix cached than it did in the recording."""
    find = bench.vllm._get_local_prefix_cache_hit

    def truncated(request: Any) -> Any:
        blocks, found, boundary, diverged = find(request)
        wanted = hits.get(request.request_id, 0)
        assert found >= wanted, f"{request.request_id} finds {found} cached tokens, recorded are {wanted}"
        manager = bench.vllm.kv_cache_manager
        return manager.truncate_computed_blocks(blocks, wanted), wanted, boundary, diverged

    bench.vllm._get_local_prefix_cache_hit = truncated
    try:
        yield
    finally:
        bench.vllm._get_local_prefix_cache_hit = find


def _numbered(records: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, int]]:
    """Equal steps told apart by how often they came."""
    seen: dict[frozenset[Member], int] = {}
    for record in records:
        members = frozenset(record.members)
        seen[members] = seen.get(members, 0) + 1
        yield record, seen[members]
