"""Real English prose, at any length, on any machine: the manual that every CPython carries.

`pydoc_data.topics` holds some 450,000 characters of the Python language reference. Prompts made from it have
the token statistics of real documents, and nothing has to be downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pydoc_data import topics


@cache
def paragraphs() -> tuple[str, ...]:
    """Prose paragraphs of at least 200 characters, in a fixed order."""
    found = []
    for _, page in sorted(topics.topics.items()):
        for block in re.split(r"\n\s*\n", page):
            text = " ".join(block.split())
            if len(text) >= 200 and "::=" not in text and ">>>" not in text:
                found.append(text)
    return tuple(found)


def prose(start: int) -> Iterator[str]:
    """Paragraphs from position `start` on, around and around."""
    pool = paragraphs()
    position = start % len(pool)
    while True:
        yield pool[position]
        position = (position + 1) % len(pool)
