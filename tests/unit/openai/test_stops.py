"""Stop strings, whatever way the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flowprefill.openai.stops import StopMatcher

SMALL = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    """The text before the earliest occurrence of any stop string."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


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
