"""Progress of long steps, as a bar on a terminal and as sparse lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 5.0


class ProgressBar:
    """Shows how much of a step is done; a context manager whose `update` is the callback."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        self._title = title
        self._said_s = float("-inf")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def update(self, step: str, done_bytes: int, total_bytes: int | None) -> None:
        """Say that `done_bytes` of `total_bytes` (None: not known) of `step` are done."""
        self._progress.update(self._task, description=step, completed=done_bytes, total=total_bytes)
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            share = f" {done_bytes / total_bytes:.0%}" if total_bytes else ""
            self._console.print(f"{self._title}: {step}{share}")
