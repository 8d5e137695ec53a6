"""A step on the ranks, as the engine core knows it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowprefill.execution.collective import LEADER
from flowprefill.scheduling.actions import Task
from flowprefill.scheduling.events import Completed, Failed
from flowprefill.server.vllm.ranks.messages import Ended


@dataclass(slots=True)
class Flight:
    """Written under the pool's lock. `executed_s` is up to the last park, `stint_began_s` None without the baton."""

    task: Task
    slot: int
    executed_s: float = 0.0
    stint_began_s: float | None = None
    standing: set[int] = field(default_factory=set)
    """Followers that stand where the ranks agreed to stop."""
    ended: dict[int, Ended] = field(default_factory=dict)
    straggling: threading.Timer | None = None
    """Runs while some rank has failed and others have not ended."""


def outcome(by_rank: Sequence[Ended]) -> Completed | Failed | None:
    """What came of a step that has ended on every rank; None when they ended it differently, which is a mistake."""
    led = by_rank[LEADER].event
    for rank, ended in enumerate(by_rank):
        if (error := failure(ended)) is not None:
            return Failed(task_id=led.task_id, error=f"rank {rank}: {error}", executed_s=led.executed_s)
    if len({type(ended.event) for ended in by_rank}) > 1:
        return None
    return led


def failure(ended: Ended) -> str | None:
    """Why the step failed on this rank; None when it completed or was unwound."""
    return ended.event.error if isinstance(ended.event, Failed) else None
