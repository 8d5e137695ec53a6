"""Runs tasks on a torch engine without a pool: a gate's `pause` runs other tasks in threads of their own and returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowprefill.engines.protocol import DecodeSequence, PrefillItem, SamplingParams

if TYPE_CHECKING:
    from flowprefill.engines.torch_engine import TorchEngine


class InterruptingGate:
    """Pauses at the points in `at` (None: at every point) and does `then` there."""

    def __init__(self, then: Callable[[int], None], at: Sequence[int] | None = None) -> None:
        self.raised = True
        self.index = -1
        self.pauses = 0
        self._then = then
        self._at = None if at is None else set(at)

    def pause(self, index: int) -> None:
        if self._at is None or index in self._at:
            self.pauses += 1
            self._then(index)


class OpenGate:
    """Never pauses."""

    raised = False
    index = -1

    def pause(self, index: int) -> None:
        raise AssertionError("an open gate is not asked to pause")


def item(
    engine: TorchEngine,
    token_ids: Sequence[int],
    *,
    first_block: int = 0,
    start: int = 0,
    sample: bool = True,
) -> PrefillItem:
    """`token_ids[start:]` of a prompt whose blocks begin at `first_block`."""
    count = -(-len(token_ids) // engine.spec.block_size)
    return PrefillItem(
        request_id=f"from-{first_block}",
        token_ids=list(token_ids[start:]),
        start=start,
        block_ids=list(range(first_block, first_block + count)),
        sample=sample,
    )


def logits(
    engine: TorchEngine, items: Sequence[PrefillItem], gate: Any = None, granularity: Any = "operator"
) -> Any:
    """Logits [S, V] of the sampled items."""
    return engine.forward(engine.plan_prefill(items, granularity), gate or OpenGate())


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread of its own and wait: a task has its own. Returns or raises what it did."""
    result: list[Any] = []
    error: list[BaseException] = []

    def main() -> None:
        try:
            result.append(work())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return result[0]


def greedy(engine: TorchEngine, token_ids: Sequence[int], num_tokens: int, first_block: int = 0) -> list[int]:
    """Prefill, then decode greedily, in blocks from `first_block` on."""
    size = engine.spec.block_size
    blocks = list(range(first_block, first_block + -(-(len(token_ids) + num_tokens) // size)))
    prompt = PrefillItem(request_id="g", token_ids=list(token_ids), start=0, block_ids=blocks, sample=True)
    [token] = engine.run(engine.plan_prefill([prompt], "operator"), OpenGate())
    assert token is not None
    tokens = [token]
    while len(tokens) < num_tokens:
        sequence = DecodeSequence(
            request_id="g",
            last_token_id=tokens[-1],
            position=len(token_ids) + len(tokens) - 1,
            block_ids=blocks,
            sampling=SamplingParams(temperature=0.0),
        )
        [token] = engine.run(engine.plan_decode([sequence]), OpenGate())
        assert token is not None
        tokens.append(token)
    return tokens
