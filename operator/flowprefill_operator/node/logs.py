"""Logs of bounded size, one a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 8 * 1024 * 1024


class BoundedLog:
    """Appends bytes to `path`; at `max_bytes` the file becomes `path.1`, replacing the one before.

    So a container's log never takes more than twice `max_bytes`. Not thread-safe.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            self.path.replace(previous(self.path))
            self._file = self.path.open("ab", buffering=0)
            self._size = 0
        self._file.write(data)
        self._size += len(data)

    def close(self) -> None:
        self._file.close()


def previous(path: Path) -> Path:
    """Where the older half of a log lies."""
    return path.with_name(path.name + ".1")


def prune(folder: Path, *, keep: int) -> None:
    """Remove the oldest logs in `folder` (with their older halves) beyond `keep`: revisions come and go."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in logs[keep:]:
        path.unlink(missing_ok=True)
        previous(path).unlink(missing_ok=True)


def note(words: str) -> str:
    """A line that the node itself adds to a container's log."""
    return f"-- {words} --"


def is_note(line: str) -> bool:
    return line.startswith("-- ") and line.rstrip().endswith(" --")


def last_lines(path: Path, count: int, *, window_bytes: int = 262_144) -> list[str]:
    """The last `count` non-empty lines of a log, oldest first; empty when there is no log."""
    lines: list[str] = []
    for part in (previous(path), path):
        try:
            with part.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - window_bytes, 0))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            continue
        lines += [line for line in text.splitlines() if line.strip()]
    return lines[-count:] if count else []


class Follower:
    """Reads what is appended to a log, across its rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def skip_to_end(self) -> None:
        """Forget what is there now: only what comes later is read."""
        for _ in self.read():
            pass

    def read(self) -> Iterator[bytes]:
        """What has been added since the last call, in pieces."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return
        if self._inode is not None and inode != self._inode:
            yield from self._rest(previous(self._path))
            self._offset = 0
        self._inode = inode
        yield from self._rest(self._path)

    def _rest(self, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                while piece := file.read(65_536):
                    self._offset += len(piece)
                    yield piece
        except FileNotFoundError:
            return
