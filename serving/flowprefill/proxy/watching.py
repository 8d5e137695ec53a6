"""Files that change under a running process: mounted ConfigMaps, and files replaced atomically.

Both change by a rename in the file's directory, so the directory is watched; once a second the file is looked at
anyway, for file systems without notification.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from watchfiles import awatch

log = logging.getLogger(__name__)

LOOK_AGAIN_MS = 1000
MAX_DOCUMENT_BYTES = 8 * 2**20


def read_document(path: Path) -> str | None:
    """The file's text; None when it is not there, not readable, too long or not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
        return raw.decode() if len(raw) <= MAX_DOCUMENT_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


async def changes(path: Path, seen: str | None) -> AsyncGenerator[str | None, None]:
    """The file's text whenever it differs from the last one given out; `seen` is the one known already."""
    directory = path.parent
    watch = awatch(
        directory, recursive=False, rust_timeout=LOOK_AGAIN_MS, yield_on_timeout=True, debounce=50, step=20
    )
    async with aclosing(watch) as looks:
        async for _ in looks:
            text = read_document(path)
            if text != seen:
                seen = text
                yield text
