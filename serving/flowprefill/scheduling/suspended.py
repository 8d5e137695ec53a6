"""Which progress to throw away when an urgent request lacks KV.

Parked tasks, and requests between two chunks, hold KV without running. The one with the latest deadline goes first, and
only work that ranks behind the urgent request, only when enough blocks come free to start it, and only
`MAX_RECOMPUTES` times for any request, so that nothing is recomputed for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.ordering import Rank
from flowprefill.scheduling.state import ActiveTask, WaitingRequest

MAX_RECOMPUTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Something that holds KV and does not run: a parked task, or a request between two chunks."""

    work: ActiveTask | WaitingRequest
    rank: Rank
    deadline_s: float

    @property
    def request_ids(self) -> list[str]:
        if isinstance(self.work, WaitingRequest):
            return [self.work.request_id]
        return [member.waiting.request_id for member in self.work.members]

    @property
    def recomputes(self) -> int:
        if isinstance(self.work, WaitingRequest):
            return self.work.recomputes
        return max(member.waiting.recomputes for member in self.work.members)


def victims(
    holders: Sequence[Holder], urgent_rank: Rank, shortage: int, kv: KVAccounting
) -> tuple[Holder, ...]:
    """The holders to drop so that `shortage` blocks come free, latest deadline first; none when it cannot be."""
    chosen: list[Holder] = []
    request_ids: list[str] = []
    gained = 0
    for holder in sorted(holders, key=lambda holder: (-holder.deadline_s, holder.rank[-1])):
        if holder.rank <= urgent_rank or holder.recomputes >= MAX_RECOMPUTES:
            continue
        gains = kv.reclaimable([*request_ids, *holder.request_ids])
        if gains <= gained:
            continue  # its blocks are shared with others, or it has none
        gained = gains
        chosen.append(holder)
        request_ids.extend(holder.request_ids)
        if gained >= shortage:
            return tuple(chosen)
    return ()
