"""Cleaning up after a node whose test process was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

from support.control_plane.node_cgroups import NodeCgroups
from support.control_plane.node_leftovers import Sysctls, remove_log_links, unmount_below
from support.control_plane.node_network import command


def sweep(folder: Path, name: str) -> None:
    """End what runs in the node's network and control groups, and remove what `Node.stop` would have removed."""
    for pid in command("ip", "netns", "pids", name, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    NodeCgroups(name).remove()
    unmount_below(folder)
    remove_log_links(folder)
    command("ip", "netns", "del", name, check=False)
    for part in ("containerd", "kubelet"):
        shutil.rmtree(folder / part, ignore_errors=True)
    Sysctls(name).restore()
