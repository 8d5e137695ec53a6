"""Stop strings over a stream: nothing that may belong to one leaves before it is sure that it does not."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a growing text at the first stop string.

    The longest tail that could still become a stop string is held back, so that no part of one is ever sent.
    First is the one that is complete first, and of two that end together the longer: generation would have stopped
    there whatever came after, so the cut does not depend on how the text is divided into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._longest = max((len(stop) for stop in stops), default=0)

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to send now, and whether a stop string was found (then nothing may follow)."""
        if not self._stops:
            return text, False
        window = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0]
        if found:
            self._held = ""
            _, begin = min(found)
            return window[:begin], True
        keep = self._num_held(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], False

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, window: str) -> int:
        """Length of the longest tail of `window` that begins some stop string."""
        for size in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[len(window) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
