"""All ranks of a step stop at the same point or none does, whatever the plan and however far they are apart."""

from __future__ import annotations

import pytest

from support.meeting_ranks import MeetingRanks, agreement

RUNS = 2_000
"""Random plans and skews here; the engine's figures take a hundred thousand."""


def test_ranks_agree_where_to_stop_over_random_plans_and_skews() -> None:
    found = agreement(RUNS)
    assert found.troubles == ()
    assert found.num_pauses > RUNS / 2, "else little is tested"
    assert found.num_unwound > RUNS / 100


def test_a_meeting_without_a_collective_before_it_is_noticed() -> None:
    assert agreement(400, false_meetings=True).troubles != ()


def test_ranks_whose_hosts_run_ahead_of_their_devices_agree_as_well() -> None:
    found = agreement(RUNS // 10, lookahead=3)
    assert found.troubles == ()
    assert found.num_pauses > RUNS / 20, "else little is tested"


def test_ranks_that_are_told_too_little_of_how_far_hosts_run_ahead_miss_each_other() -> None:
    assert any("ran past" in trouble for trouble in agreement(400, lookahead=3, run_ahead=0).troubles)


@pytest.mark.parametrize("seed", range(50))
def test_the_stop_is_the_first_meeting_behind_the_leader(seed: int) -> None:
    parts = (["point"] * 3 + ["collective", "meeting"]) * 4
    ranks = MeetingRanks(seed, parts=parts).run()
    assert ranks.trouble is None
    # Meetings are points 3, 7, 11 and 15: after each three points of a stretch.
    assert set(ranks.pauses) <= {3, 7, 11, 15}
