"""Holds end exactly once, and never under a reader."""

from __future__ import annotations

from flowprefill.server.holds import EndReason, HoldTable
from support.pods import until


class Ends:
    def __init__(self) -> None:
        self.ends: list[tuple[str, EndReason]] = []

    def __call__(self, request_id: str, reason: EndReason) -> None:
        self.ends.append((request_id, reason))


async def test_the_first_end_counts() -> None:
    ends = Ends()
    holds = HoldTable(ends)
    holds.add("a", (1, 2))
    assert holds.end("a", "pulled")
    assert not holds.end("a", "aborted")
    assert not holds.end("b", "aborted")
    assert ends.ends == [("a", "pulled")]
    assert len(holds) == 0


async def test_a_lease_ends_by_itself() -> None:
    ends = Ends()
    holds = HoldTable(ends, lease_s=0.01)
    holds.add("a", (1,))
    await holds.wait_empty()
    assert ends.ends == [("a", "expired")]


async def test_blocks_stay_while_somebody_reads_them_also_when_the_lease_ends() -> None:
    ends = Ends()
    holds = HoldTable(ends, lease_s=0.01)
    holds.add("a", (3, 4))
    with holds.reading("a") as first, holds.reading("a") as second:
        assert first == second == (3, 4)
        await until(lambda: held(holds, "a") is None, what="the lease has ended")
        assert ends.ends == []
        with holds.reading("a") as late:
            assert late is None
    assert ends.ends == [("a", "expired")]


async def test_wait_empty_returns_at_once_when_nothing_is_held() -> None:
    holds = HoldTable(Ends())
    await holds.wait_empty()
    holds.add("a", ())
    holds.end("a", "pulled")
    await holds.wait_empty()


def held(holds: HoldTable, request_id: str) -> tuple[int, ...] | None:
    with holds.reading(request_id) as blocks:
        return blocks
