"""A model of equal steps for tests of the pool: point i of a task lies i seconds into it, and nothing else happens.

`Stage` runs a script against a pool on a virtual clock: the script is one thread of it, so the pool's threads and the
script take turns and every instant is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import DecodeSequence, EngineSpec, Gate, Plan, PrefillItem
from flowprefill.execution.pool import ExecutionPool, TaskEvent
from flowprefill.execution.virtual_clock import VirtualClock
from flowprefill.scheduling.actions import Granularity, Task, TaskItem

SPEC = EngineSpec(
    engine="ladder",
    model="ladder",
    revision="0",
    device="none",
    dtype="uint64",
    max_model_len=1000,
    block_size=1,
    num_kv_blocks=1000,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    kv_block_bytes=16,
    vocab_size=1000,
    eos_token_ids=(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPlan:
    name: str
    num_points: int
    max_points_between_collectives: int = 1

    def work_done(self, index: int) -> float:
        return index / self.num_points


class LadderEngine:
    """Runs tasks of as many one-second steps as their first item has tokens. The fields say what goes wrong."""

    def __init__(self, clock: Timekeeper) -> None:
        self._clock = clock
        self.fail_at: dict[str, int] = {}
        self.errors: dict[str, BaseException] = {}
        self.fail_plan: set[str] = set()
        self.fail_unwind: set[str] = set()
        self.fail_context = False
        self.contexts_open = 0
        self.contexts_entered = 0
        self.steps: list[tuple[float, str, int]] = []  # when, whose, which step ended
        self.planned: list[str] = []
        self.unwound: list[str] = []
        self._advancing: str | None = None

    @property
    def spec(self) -> EngineSpec:
        return SPEC

    def thread_context(self) -> AbstractContextManager[object]:
        return self._context()

    @contextmanager
    def _context(self) -> Iterator[None]:
        if self.fail_context:
            raise RuntimeError("no device for this thread")
        self.contexts_entered += 1
        self.contexts_open += 1
        try:
            yield
        finally:
            self.contexts_open -= 1

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> Plan:
        name = items[0].request_id
        self.planned.append(name)
        if name in self.fail_plan:
            raise RuntimeError(f"cannot lay out {name}")
        return LadderPlan(name=name, num_points=len(items[0].token_ids))

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> Plan:
        return LadderPlan(name=sequences[0].request_id, num_points=1)

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        assert isinstance(plan, LadderPlan)
        try:
            return self._climb(plan, gate)
        except BaseException:
            self.unwound.append(plan.name)
            if plan.name in self.fail_unwind:
                raise RuntimeError(f"{plan.name} could not let go") from None
            raise

    def _climb(self, plan: LadderPlan, gate: Gate) -> Sequence[int | None]:
        if plan.name in self.errors:
            raise self.errors[plan.name]
        for index in range(plan.num_points):
            gate.index = index
            if gate.raised:
                gate.pause(index)
            if self.fail_at.get(plan.name) == index:
                raise RuntimeError(f"{plan.name} broke at {index}")
            assert self._advancing is None, f"{plan.name} and {self._advancing} advance at once"
            self._advancing = plan.name
            self._clock.sleep_until_s(self._clock.now_s() + 1.0)
            self._advancing = None
            self.steps.append((self._clock.now_s(), plan.name, index))
        return [plan.num_points]

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        raise NotImplementedError

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


def ladder_task(task_id: int, name: str, num_steps: int) -> tuple[Task, list[PrefillItem]]:
    """A task with one request called `name`, and its items."""
    item = TaskItem(request_id=name, start=0, num_tokens=num_steps, block_ids=(), completes=True)
    task = Task(task_id=task_id, items=(item,), predicted_s=float(num_steps))
    prefill = PrefillItem(request_id=name, token_ids=range(num_steps), start=0, block_ids=(), sample=True)
    return task, [prefill]


class Stage:
    """A pool over a ladder on a virtual clock. `events` are what the tasks posted, and when."""

    def __init__(self, *, max_idle_threads: int = 8) -> None:
        self.clock = VirtualClock()
        self.engine = LadderEngine(self.clock)
        self.events: list[tuple[float, TaskEvent]] = []
        self.broken: list[BaseException] = []
        self.pool = ExecutionPool(self.engine, self.clock, max_idle_threads=max_idle_threads)
        self.pool.connect(lambda event: self.events.append((self.clock.now_s(), event)), self.broken.append)
        self._raised: BaseException | None = None

    def submit(self, task_id: int, name: str, num_steps: int) -> None:
        self.pool.submit(*ladder_task(task_id, name, num_steps))

    def until(self, when_s: float) -> None:
        """Let the others run until `when_s`, and everything that happens at that instant."""
        self.clock.sleep_until_s(when_s)

    def play(self, script: Callable[[Stage], None], *, close: bool = True) -> None:
        """Run the script to its end, then close the pool. Raises what the script raised."""

        def main() -> None:
            try:
                script(self)
            except BaseException as error:
                self._raised = error

        thread = self.clock.start_thread(main, name="script", rank=9)
        thread.join(30)
        assert not thread.is_alive(), "the script did not end"
        if close:
            self.pool.close()
            assert self.pool.num_threads == 0
            assert self.engine.contexts_open == 0
        if self._raised is not None:
            raise self._raised
