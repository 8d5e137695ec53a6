"""What a tree of processes holds: for tests that nothing leaks and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

SHM = "/dev/shm/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts over a process and all below it. `shared_memory` names the files in /dev/shm that they hold or map."""

    processes: int
    rss_bytes: int
    threads: int
    files: int
    shared_memory: frozenset[str]


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it, as far as they live."""
    try:
        root = psutil.Process(pid)
        return [one for one in (root, *root.children(recursive=True)) if is_alive(one)]
    except psutil.NoSuchProcess:
        return []


def group(pgid: int) -> list[psutil.Process]:
    """The members of a process group, also those whose parent has ended."""

    def is_member(process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == pgid
        except ProcessLookupError:
            return False

    return [one for one in psutil.process_iter() if is_member(one) and is_alive(one)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that only waits for its parent to take note of its end does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def usage(pid: int) -> Usage:
    """What a process and all below it hold now. Those that end meanwhile count for nothing."""
    processes = rss_bytes = threads = files = 0
    shared: set[str] = set()
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            with process.oneshot():
                rss, more_threads, more_files = (
                    process.memory_info().rss,
                    process.num_threads(),
                    process.num_fds(),
                )
            shared |= _shared_memory(process.pid)
            processes, rss_bytes = processes + 1, rss_bytes + rss
            threads, files = threads + more_threads, files + more_files
    return Usage(
        processes=processes,
        rss_bytes=rss_bytes,
        threads=threads,
        files=files,
        shared_memory=frozenset(shared),
    )


def _shared_memory(pid: int) -> set[str]:
    """Files in /dev/shm that still have their name, mapped or open in a process."""
    proc = Path(f"/proc/{pid}")
    mapped = (line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines() if SHM in line)
    found = {path for path in mapped if path.startswith(SHM)}
    for descriptor in (proc / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(descriptor))
    return {path for path in found if path.startswith(SHM) and not path.endswith(" (deleted)")}
