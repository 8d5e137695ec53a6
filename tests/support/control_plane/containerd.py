"""containerd for a node: everything that it writes is in one folder, and nothing stays behind."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from support.control_plane.daemon import Daemon
from support.control_plane.images_pack import pack
from support.control_plane.node_network import BRIDGE, POD_CIDR, command

PAUSE = "registry.k8s.io/pause:3.10"
CNI_RESULTS = Path("/var/lib/cni/results")
IMPORT_S = 300.0
KILL_S = 20.0

_CONFIG = """\
version = 3
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
    conf_dir = "{folder}/cni"
"""


class Containerd:
    """The container runtime of one node."""

    def __init__(self, assets: Path, folder: Path, prefix: Sequence[str], network: str) -> None:
        """`folder` (must not exist) takes all it writes, `network` is the name of the pods' network."""
        self._assets = assets
        self._folder = folder
        self._network = network
        self.socket = folder / "containerd.sock"
        argv = [*prefix, str(assets / "containerd"), "-c", str(folder / "config.toml")]
        self._daemon = Daemon("containerd", argv, folder / "containerd.log")

    def start(self) -> None:
        """Ready when it answers and has the image of the pods' sandbox."""
        (self._folder / "cni").mkdir(parents=True)
        (self._folder / "config.toml").write_text(
            _CONFIG.format(folder=self._folder, socket=self.socket, pause=PAUSE)
        )
        (self._folder / "cni" / "10-pods.conflist").write_text(json.dumps(self._cni()))
        self._daemon.start(lambda: "Server:" in self._ctr("version", check=False))
        archive = pack(PAUSE, {"pause": self._assets / "pause"}, ["/pause"], self._folder / "pause.tar")
        self.load(archive)

    def load(self, archive: Path) -> None:
        """Take the images of a Docker or OCI archive, under the names in it."""
        self._ctr("images", "import", str(archive), timeout_s=IMPORT_S)

    def images(self) -> list[str]:
        """The names of the images it has."""
        return self._ctr("images", "ls", "-q").split()

    def kill(self, container: str) -> None:
        """Kill a container's first process with SIGKILL."""
        self._ctr("tasks", "kill", "--signal", "SIGKILL", container)

    def stop(self) -> None:
        """Kill every container, then end. The kubelet must be gone by now."""
        end_s = time.monotonic() + KILL_S
        while (tasks := self._ctr("tasks", "ls", "-q", check=False).split()) and time.monotonic() < end_s:
            for task in tasks:
                self._ctr("tasks", "kill", "--signal", "SIGKILL", "--all", task, check=False)
                self._ctr("tasks", "rm", "--force", task, check=False)
        for container in self._ctr("containers", "ls", "-q", check=False).split():
            self._ctr("containers", "rm", container, check=False)
            for result in CNI_RESULTS.glob(f"*-{container}-*"):
                result.unlink(missing_ok=True)
        self._daemon.stop()

    def _ctr(self, *args: str, check: bool = True, timeout_s: float = 30.0) -> str:
        argv = [str(self._assets / "ctr"), "--address", str(self.socket), "--namespace", "k8s.io", *args]
        return command(*argv, check=check, timeout_s=timeout_s)

    def _cni(self) -> dict[str, object]:
        return {
            "cniVersion": "0.4.0",
            "name": self._network,
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": BRIDGE,
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self._folder / "addresses"),
                        "ranges": [[{"subnet": POD_CIDR}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
