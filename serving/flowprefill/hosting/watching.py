"""Files that change under a running process: mounted ConfigMaps and Secrets, files replaced atomically.

All change by a rename in the file's directory, so the directory is watched; once a second the file is looked at
anyway, for file systems without notification.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from watchfiles import awatch

from flowprefill.errors import InvalidConfiguration

LOOK_AGAIN_MS = 1000
STEP_MS = 50
"""How soon a change is seen, and how often the watching thread wakes."""

MAX_BYTES = 8 * 2**20


class WatchedFile:
    """A text file that others replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path)

    def read(self) -> str:
        """Its text. Raises `InvalidConfiguration` when it is not there, not readable, too long or not UTF-8."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InvalidConfiguration(f"{self.path} cannot be read: {reason}") from None
        if len(raw) > MAX_BYTES:
            raise InvalidConfiguration(
                f"{self.path} has more than {MAX_BYTES} bytes, which is the most accepted"
            )
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidConfiguration(
                f"{self.path} is not UTF-8 text: byte {raw[error.start]:#04x} at {error.start}"
            ) from None

    def changed(self) -> bool:
        """Whether it was replaced, removed or put back since the last call, at first since it was made."""
        stamp = _stamp(self.path)
        changed = stamp != self._stamp
        self._stamp = stamp
        return changed

    async def changes(self) -> AsyncGenerator[None, None]:
        """An item for every change, until closed."""
        watch = awatch(
            self.path.parent,
            recursive=False,
            rust_timeout=LOOK_AGAIN_MS,
            yield_on_timeout=True,
            debounce=STEP_MS,
            step=STEP_MS,
        )
        async with aclosing(watch) as events:
            async for _ in events:
                if self.changed():
                    yield


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file is rewritten, or when its mount's symlink moves to another file. None: not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
