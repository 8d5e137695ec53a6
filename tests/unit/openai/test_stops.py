"""Stop strings, whatever way the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowprefill.openai.stops import StopMatcher

SMALL = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    """The text before the first stop string, growing it by one character at a time as a generator would."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@example("aba", ["b", "aba"], [])
@example("aba", ["b", "aba"], [2])
@settings(max_examples=1000, deadline=None)
@given(SMALL, STOPS, st.lists(st.integers(0, 20), max_size=6))
def test_the_text_is_cut_at_the_first_stop_for_every_chunking(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    stopped = False
    for piece in pieces(text, cuts):
        out, stopped = matcher.feed(piece)
        sent += out
        # Nothing that has left may turn out to belong to a stop string.
        assert cut(text, stops).startswith(sent)
        if stopped:
            break
    if not stopped:
        sent += matcher.flush()
    expected = cut(text, stops)
    assert stopped == any(stop in text for stop in stops)
    assert sent == expected


def test_only_a_tail_that_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("hello S") == ("hello ", False)
    assert matcher.feed("T") == ("", False)
    assert matcher.feed("ART") == ("START", False)
    assert matcher.feed(" STO") == (" ", False)
    assert matcher.feed("P!") == ("", True)


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).feed("anything") == ("anything", False)
