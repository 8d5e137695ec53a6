"""What an engine is to the execution pool and to the servers.

An engine computes; it never decides. It is told which blocks to use and it calls the gate at its preemption
points. Exactly one thread advances inside an engine at any time (the pool's baton sees to that), but many
threads may be *parked* inside it, each with its own activations and attention metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from flowprefill.scheduling.actions import Granularity


class TaskUnwound(BaseException):
    """Raised by the gate at a preemption point to unwind a cancelled task.

    A BaseException, so that no `except Exception` in model code can swallow it.
    """


class EngineBroken(BaseException):
    """The engine can run nothing any more: the process must end and be started anew.

    A BaseException, so that nothing on the way up takes it for a failure of one batch.
    """


class Gate(Protocol):
    """The preemption gate as an engine sees it: one attribute read per point, a call only when asked.

    At point `index` an engine does `if gate.raised: gate.pause(index)`. `pause` returns once the task may go
    on (at once, or after other tasks ran) and raises `TaskUnwound` when the task is to end. The engine also
    stores its position with `gate.index = index`, so that progress can be read from another thread.
    """

    index: int

    @property
    def raised(self) -> bool:
        """Whether there may be something to answer at this point."""
        ...

    def pause(self, index: int) -> None:
        """Answer the pause request at point `index`; may block for as long as others run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a loaded engine says of itself.

    `kv_block_bytes` is the size of one block over all layers, keys and values. `vocab_size` bounds token ids.
    """

    engine: str
    model: str
    revision: str
    device: str
    dtype: str
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_block_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `seed` None draws from the process's generator."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillItem:
    """Tokens of one request to run: `token_ids` are at positions `[start, start + len(token_ids))`.

    `block_ids` are its blocks in order, enough for all positions up to the end; KV before `start` is in place.
    `sample` asks for the next token after the last of `token_ids`, chosen by `sampling`; a seed's generator makes its
    first draw for it.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    sampling: SamplingParams = GREEDY


@dataclass(slots=True, kw_only=True)
class DecodeSequence:
    """One sequence in a decode step, as the server keeps it.

    `last_token_id` is the token to feed, at position `position`; its KV is written by the step. `generator`
    is the engine's own random state for this sequence, None until the engine fills it in: a seeded one begins after
    `num_sampled` draws, those of the answer's tokens that were chosen before this sequence began.
    """

    request_id: str
    last_token_id: int
    position: int
    block_ids: Sequence[int]
    sampling: SamplingParams
    generator: object | None = None
    num_sampled: int = 0
    banned_token_ids: Sequence[int] = field(default_factory=tuple)


class Plan(Protocol):
    """A batch made ready to run. Point indices run from 0 to `num_points - 1`, the same for equal plans."""

    @property
    def num_points(self) -> int: ...

    @property
    def max_points_between_collectives(self) -> int:
        """The most points between two collectives (tensor parallel ranks pause at counter plus this)."""
        ...

    def work_done(self, index: int) -> float:
        """Fraction of the plan's work that lies before point `index`, in [0, 1], never decreasing."""
        ...


class Engine(Protocol):
    """A loaded model that prefills, decodes and moves KV blocks.

    `plan_*` and `run` are called in a task's thread. `read_blocks` and `write_blocks` may be called from any
    thread for blocks that no running task writes.
    """

    @property
    def spec(self) -> EngineSpec: ...

    def thread_context(self) -> AbstractContextManager[object]:
        """What every thread that calls `plan_*` or `run` enters once, for its whole life.

        Sets what is thread-local: inference mode, device, stream. `contextlib.nullcontext()` where nothing is.
        """
        ...

    def plan_prefill(self, items: Sequence[PrefillItem], granularity: Granularity) -> Plan:
        """Lay out a packed batch: tiles, points, work per point. Runs nothing."""
        ...

    def plan_decode(self, sequences: Sequence[DecodeSequence]) -> Plan:
        """Lay out one decode step over `sequences` (points too: a step can be preempted as well)."""
        ...

    def run(self, plan: Plan, gate: Gate) -> Sequence[int | None]:
        """Run to the end, calling the gate at every point.

        Returns one entry per item in order: the next token, or None where `sample` is False. KV of all items
        is in place when it returns. Raises `TaskUnwound` from the gate, or any error of the model.
        """
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        """Bytes of these blocks, `[layer, 2, block, block_size, kv_heads, head_dim]`, C order (a copy)."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Put bytes in `read_blocks` order into these blocks. Raises ValueError on a size mismatch."""
        ...

    def close(self) -> None:
        """Free threads and device memory. The engine is not used afterwards."""
        ...
