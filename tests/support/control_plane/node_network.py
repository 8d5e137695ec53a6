"""The network namespace of a node: its pods, its Services and its control plane, apart from the machine's network."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

POD_CIDR = "10.244.0.0/24"
BRIDGE = "pods0"
BRIDGE_ADDRESS = "10.244.0.1"
"""The node's own address, on the bridge that its pods are on."""
DNS_ADDRESS = "10.96.0.10"
COMMAND_S = 30.0

_numbers = itertools.count(1)


class NodeNetwork:
    """A namespace with a bridge for pods, and a pair of interfaces over which this process reaches the API server.

    Pods reach each other and Services; nothing leads out. With the namespace everything is gone.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` exists and takes the file that names the cluster's DNS server."""
        number = next(_numbers)
        self.name = f"fpnode-{os.getpid()}-{number}"
        self._resolv_conf = folder / "resolv.conf"
        index = (os.getpid() + 97 * number) % 16384  # 169.254.0.0/16 has as many networks of four addresses
        self._network = f"169.254.{index // 64}.{index % 64 * 4}"
        self._outer = f"fpn{os.getpid()}n{number}"  # at most 15 characters

    @property
    def address(self) -> str:
        """Where this process reaches what listens in the namespace."""
        return self._host(2)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Starts a program in the namespace. Unlike `ip netns exec` it leaves /sys, and so the cgroups, as they are."""
        return ("nsenter", f"--net=/run/netns/{self.name}")

    def client(self, *argv: str) -> list[str]:
        """The command line that runs `argv` in the namespace, with the cluster's DNS."""
        bind = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return [*self.prefix, "unshare", "--mount", "sh", "-c", bind, str(self._resolv_conf), *argv]

    def up(self) -> None:
        self._resolv_conf.write_text(
            f"nameserver {DNS_ADDRESS}\nsearch default.svc.cluster.local svc.cluster.local cluster.local\n"
            "options ndots:5\n"
        )
        command("ip", "netns", "add", self.name)
        command("ip", "link", "add", self._outer, "type", "veth", "peer", "name", "up0", "netns", self.name)
        command("ip", "addr", "add", f"{self._host(1)}/30", "dev", self._outer)
        command("ip", "link", "set", self._outer, "up")
        self._inside("ip", "addr", "add", f"{self._host(2)}/30", "dev", "up0")
        self._inside("ip", "link", "set", "up0", "up")
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "link", "add", BRIDGE, "type", "bridge")
        self._inside("ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
        self._inside("ip", "link", "set", BRIDGE, "up")
        # Service addresses need some route before kube-proxy rewrites them.
        self._inside("ip", "route", "add", "default", "via", "10.244.0.254")
        self._inside("sysctl", "-qw", "net.ipv4.ip_forward=1")

    def down(self) -> None:
        command("ip", "link", "del", self._outer, check=False)
        command("ip", "netns", "del", self.name, check=False)

    def _inside(self, *argv: str) -> None:
        command(*self.prefix, *argv)

    def _host(self, number: int) -> str:
        head, _, last = self._network.rpartition(".")
        return f"{head}.{int(last) + number}"


def command(*argv: str, check: bool = True, timeout_s: float = COMMAND_S) -> str:
    """Run a short program; its output. With `check` an exit status other than 0 raises with what it said."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        argv,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(
            f"{' '.join(argv)} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}"
        )
    return done.stdout
