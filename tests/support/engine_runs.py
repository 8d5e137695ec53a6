"""Running prompts on an engine without a pool.

A gate's `pause` runs the other tasks itself, each in a thread of its own, and returns. So tasks nest as they do under the
pool, at exactly the points that a test names.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowprefill.engines.protocol import Engine, PrefillItem


@dataclass(slots=True)
class Gate:
    """Visits are recorded; `on_point` maps a point to what happens there."""

    on_point: dict[int, Callable[[], None]] = field(default_factory=dict)
    every_point: Callable[[], None] | None = None
    visited: list[int] = field(default_factory=list)
    raised: bool = True

    @property
    def index(self) -> int:
        return self.visited[-1] if self.visited else 0

    @index.setter
    def index(self, index: int) -> None:
        self.visited.append(index)

    def pause(self, index: int) -> None:
        if self.every_point is not None:
            self.every_point()
        if index in self.on_point:
            self.on_point[index]()


def open_gate() -> Gate:
    return Gate(raised=False)


def prompt(seed: int, length: int, engine: Engine) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(engine.spec.vocab_size) for _ in range(length)]


def blocks(engine: Engine, first: int, num_tokens: int) -> list[int]:
    """Enough blocks for `num_tokens` tokens, from block `first` on."""
    return list(range(first, first + -(-num_tokens // engine.spec.block_size)))


def item(
    tokens: Sequence[int],
    block_ids: Sequence[int],
    *,
    start: int = 0,
    end: int | None = None,
    sample: bool = True,
    name: str = "r",
) -> PrefillItem:
    return PrefillItem(
        request_id=name, token_ids=tokens[start:end], start=start, block_ids=block_ids, sample=sample
    )


def prefill(engine: Engine, *items: PrefillItem, gate: Gate | None = None) -> list[int | None]:
    plan = engine.plan_prefill(items, "operator")
    return list(engine.run(plan, gate or open_gate()))


def alone(engine: Engine, tokens: Sequence[int], first_block: int = 0) -> int:
    [token_id] = prefill(engine, item(tokens, blocks(engine, first_block, len(tokens))))
    assert token_id is not None
    return token_id


def in_a_thread(engine: Engine, work: Callable[[], None]) -> None:
    """Run `work` in a task's thread and wait for it. Raises what it raised."""
    raised: list[BaseException] = []

    def main() -> None:
        try:
            with engine.thread_context():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    if raised:
        raise raised[0]
