"""The control groups of a node, for both versions of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
EMPTY_S = 10.0
WEIGHT = 4
"""CPU time of all pods together when the machine is busy, in processes outside them: those compete one by one."""


class NodeCgroups:
    """The groups below which a kubelet keeps those of its pods: a node's own, apart from any other kubelet's."""

    def __init__(self, name: str) -> None:
        self.is_v2 = (MOUNT / "cgroup.controllers").is_file()
        self._name = name

    @property
    def root(self) -> str:
        """The kubelet's `cgroupRoot`."""
        return f"/{self._name}"

    def create(self) -> None:
        if self.is_v2:
            # A group has the controllers that the one above hands out.
            for controller in (MOUNT / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):
                    (MOUNT / "cgroup.subtree_control").write_text(f"+{controller}")
        for directory in self._directories():
            directory.mkdir(exist_ok=True)
            if not self.is_v2 and directory.parent.name.startswith("cpuset"):
                for value in ("cpuset.cpus", "cpuset.mems"):
                    (directory / value).write_text((directory.parent / value).read_text())
            for file, default in (("cpu.shares", 1024), ("cpu.weight", 100)):
                if (directory / file).is_file():
                    (directory / file).write_text(str(WEIGHT * default))

    def remove(self) -> None:
        """End what still runs in them and remove them."""
        for top in self._directories():
            if not top.is_dir():
                continue
            groups = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
            end_s = time.monotonic() + EMPTY_S
            for group in (*groups, top):
                while group.is_dir() and time.monotonic() < end_s:
                    for pid in (group / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                    with contextlib.suppress(OSError):
                        group.rmdir()
                        break
                    time.sleep(0.05)

    def _directories(self) -> list[Path]:
        if self.is_v2:
            return [MOUNT / self._name]
        # `cgroup.procs` marks a hierarchy; links such as cpu -> cpu,cpuacct would name it twice.
        found = (path for path in sorted(MOUNT.iterdir()) if not path.is_symlink())
        return [path / self._name for path in found if (path / "cgroup.procs").is_file()]
