"""What a real node needs of this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from support.capabilities import require
from support.control_plane.assets import assets

PROGRAMS = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "coredns", "pause")
SYSTEM_PROGRAMS = ("runc", "iptables", "conntrack", "ip", "nsenter", "unshare", "sysctl", "mount", "umount")
CNI = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
DEBIAN = "runc containernetworking-plugins iptables conntrack iproute2"
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def node_assets() -> Path:
    """The folder with the programs of a node; the test skips where the machine cannot run one."""
    folder = assets("newest")
    require("node", *_state(folder))
    return folder


def _state(folder: Path) -> tuple[bool, str]:
    if os.geteuid() != 0:
        return False, "a kubelet needs root"
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if missing:
        return False, f"{', '.join(missing)} not in {folder}"
    missing = [name for name in SYSTEM_PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    missing += ["CNI plugins"] * (not any((place / "bridge").exists() for place in CNI))
    if missing:
        return False, f"{', '.join(missing)} not on this machine; on Debian: apt-get install {DEBIAN}"
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return False, "/sys/fs/cgroup cannot be written"
    return True, ""
