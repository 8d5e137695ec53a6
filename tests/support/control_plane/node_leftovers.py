"""What a kubelet changes outside its folder, and how it is put back."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from support.control_plane.node_network import command

SYSCTLS = ("kernel.panic", "kernel.panic_on_oops", "vm.overcommit_memory")
"""What a kubelet sets for the whole machine."""
POD_LOG_LINKS = Path("/var/log/containers")
DEVICE_PLUGINS = Path("/var/lib/kubelet")
"""Where a kubelet listens for device plugins, whatever its root directory is."""
_SAVED = Path("/run/flowprefill-test-nodes")


class Sysctls:
    """The machine's settings as they were before the first node that runs now. The last one puts them back."""

    def __init__(self, name: str) -> None:
        """`name` is the node's; its second part is the number of this process."""
        self._file = _SAVED / name

    def save(self, folder: Path) -> None:
        """Note them, and the node's `folder` for whoever has to clean up after this process."""
        _SAVED.mkdir(exist_ok=True)
        others = sorted(_SAVED.iterdir())
        if others:
            settings = others[0].read_text().splitlines()[1:]
        else:
            settings = [f"{name}={_value(name)}" for name in SYSCTLS]
        self._file.write_text("\n".join([str(folder), *settings]))

    def restore(self) -> None:
        settings = self._file.read_text().splitlines()[1:]
        self._file.unlink()
        if any(_SAVED.iterdir()):
            return
        for line in settings:
            command("sysctl", "-qw", line)
        _SAVED.rmdir()


def abandoned() -> list[tuple[Path, str]]:
    """Folder and name of every node whose process was killed before it could stop it."""
    return [
        (Path(file.read_text().splitlines()[0]), file.name)
        for file in sorted(_SAVED.glob("*"))
        if not Path("/proc", file.name.split("-")[1]).is_dir()
    ]


class DevicePlugins:
    """The kubelet's folder for device plugins, removed again where there was none."""

    def __init__(self) -> None:
        self._found = DEVICE_PLUGINS.exists()

    def restore(self) -> None:
        if not self._found:
            shutil.rmtree(DEVICE_PLUGINS, ignore_errors=True)


def unmount_below(folder: Path) -> None:
    """Unmount everything that is mounted in a folder."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in sorted((p for p in points if Path(p).is_relative_to(folder)), reverse=True):
        command("umount", "--lazy", point, check=False)


def remove_log_links(folder: Path) -> None:
    """Remove the kubelet's links to logs below `folder`."""
    with contextlib.suppress(OSError):
        for link in POD_LOG_LINKS.iterdir():
            if link.is_symlink() and Path(os.readlink(link)).is_relative_to(folder):
                link.unlink()
        POD_LOG_LINKS.rmdir()


def _value(name: str) -> str:
    return Path("/proc/sys", *name.split(".")).read_text().strip()
