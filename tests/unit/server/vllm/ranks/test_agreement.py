"""All ranks of a step stop at the same point or none does, whatever the plan and however far they are apart."""

from __future__ import annotations

import pytest

from support.meeting_ranks import MeetingRanks

RUNS = 100_000
"""Random plans and skews; the figure of the engine's acceptance table."""


def test_ranks_agree_where_to_stop_over_random_plans_and_skews() -> None:
    num_pauses = 0
    num_unwound = 0
    for seed in range(RUNS):
        ranks = MeetingRanks(seed).run()
        assert ranks.trouble is None, f"seed {seed}: {ranks.trouble}"
        num_pauses += len(ranks.pauses)
        num_unwound += ranks.ranks[0].end == "unwound"
    assert num_pauses > RUNS / 2, "most runs are paused at least once"
    assert num_unwound > RUNS / 100


def test_a_meeting_without_a_collective_before_it_would_be_noticed() -> None:
    runs = [MeetingRanks(seed, false_meetings=True).run() for seed in range(3_000)]
    assert any(run.trouble is not None for run in runs)


@pytest.mark.parametrize("seed", range(50))
def test_the_stop_is_the_first_meeting_behind_the_leader(seed: int) -> None:
    parts = (["point"] * 3 + ["collective", "meeting"]) * 4
    ranks = MeetingRanks(seed, parts=parts).run()
    assert ranks.trouble is None
    # Meetings are points 3, 7, 11 and 15: after each three points of a stretch.
    assert set(ranks.pauses) <= {3, 7, 11, 15}
