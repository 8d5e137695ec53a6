"""A program that runs in the background of a test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

START_S = 60.0
STOP_S = 20.0


class Daemon:
    """One program with a log file. It is gone after `stop`, and its process group with it."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name = name
        self._argv = list(argv)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Start it and wait until `ready`. Raises AssertionError with the end of its log."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end_s = time.monotonic() + START_S
        while not ready():
            code = self._process.poll()
            assert code is None, f"{self.name} ended with {code}:\n{self.tail()}"
            assert time.monotonic() < end_s, f"{self.name} is not ready after {START_S:.0f} s:\n{self.tail()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End it: SIGTERM, then SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def tail(self, num_bytes: int = 2000) -> str:
        """The end of its log."""
        return self._log.read_bytes()[-num_bytes:].decode(errors="replace")
