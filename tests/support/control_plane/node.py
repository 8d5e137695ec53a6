"""A real node: kubelet, containerd, kube-proxy and CoreDNS beside a control plane, in a network of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.control_plane.containerd import Containerd
from support.control_plane.daemon import Daemon
from support.control_plane.node_cgroups import NodeCgroups
from support.control_plane.node_leftovers import (
    DevicePlugins,
    Sysctls,
    abandoned,
    remove_log_links,
    unmount_below,
)
from support.control_plane.node_network import BRIDGE_ADDRESS, DNS_ADDRESS, POD_CIDR, NodeNetwork
from support.control_plane.node_sweep import sweep
from support.control_plane.plane import ControlPlane, Surroundings

NODE_NAME = "node1"
READY_S = 90.0
RUN_S = 120.0

USERS = {
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "kube-proxy": ("system:kube-proxy", ""),
}

_COREFILE = """\
.:53 {{
  bind {address}
  errors
  kubernetes cluster.local {{
    kubeconfig {kubeconfig}
  }}
}}
"""


class Node:
    """One node and its control plane. `stop` leaves nothing: no process, mount, interface, group or setting.

    Pods reach each other, Services and the API server, and nothing outside. kube-proxy enforces no NetworkPolicy.
    """

    def __init__(self, assets: Path, folder: Path) -> None:
        """`assets` holds the programs, `folder` (must not exist; at most 70 characters) all that they write."""
        folder.mkdir(parents=True)
        self._assets = assets
        self._folder = folder
        self._running = ExitStack()
        self._network = NodeNetwork(folder)
        self._cgroups = NodeCgroups(self._network.name)
        self._containerd = Containerd(assets, folder / "containerd", self._network.prefix, self._network.name)
        self.plane = ControlPlane(
            assets,
            folder / "plane",
            Surroundings(
                prefix=self._network.prefix,
                address=self._network.address,
                advertised=BRIDGE_ADDRESS,
                users=USERS,
            ),
        )

    @property
    def prefix(self) -> tuple[str, ...]:
        """Starts a program in the node's network."""
        return self._network.prefix

    def start(self) -> None:
        """Returns when the node is Ready and has DNS."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._running.close()

    def load_image(self, archive: Path) -> None:
        """Take the images of an archive, as `docker save` or `buildah push docker-archive:` write it."""
        self._containerd.load(archive)

    def images(self) -> list[str]:
        """The names of the images that the node has."""
        return self._containerd.images()

    def kill(self, pod: Mapping[str, Any]) -> None:
        """Kill the first container of a pod with SIGKILL, as a lack of memory does."""
        container: str = pod["status"]["containerStatuses"][0]["containerID"]
        self._containerd.kill(container.removeprefix("containerd://"))

    def client(self, *argv: str) -> list[str]:
        """The command line that runs `argv` in the node's network with the cluster's DNS."""
        return self._network.client(*argv)

    def run(self, *argv: str, timeout_s: float = RUN_S, check: bool = True) -> str:
        """Run a program as `client` says; its output. With `check` an exit status other than 0 fails the test."""
        done = subprocess.run(
            self.client(*argv), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    def set_capacity(self, resource: str, amount: int) -> None:
        """Let the node claim an extended resource such as `nvidia.com/gpu`."""
        claimed = {resource: str(amount)}
        patch = {"status": {"capacity": claimed, "allocatable": claimed}}
        self.plane.kubectl(
            "patch", "node", NODE_NAME, "--subresource=status", "--type=merge", "-p", json.dumps(patch)
        )

    def _start(self) -> None:
        for folder, name in abandoned():
            sweep(folder, name)
        sysctls = Sysctls(self._network.name)
        sysctls.save(self._folder)
        undo = self._running.callback
        undo(sysctls.restore)
        undo(DevicePlugins().restore)
        undo(lambda: shutil.rmtree(self._folder / "containerd", ignore_errors=True))
        undo(lambda: shutil.rmtree(self._folder / "kubelet", ignore_errors=True))
        undo(self._cgroups.remove)
        undo(lambda: remove_log_links(self._folder))
        undo(lambda: unmount_below(self._folder))
        self._cgroups.create()
        undo(self._network.down)
        self._network.up()
        undo(self.plane.stop)
        self.plane.start()
        undo(self._containerd.stop)
        self._containerd.start()
        self._daemon("kubelet", *self._kubelet_flags(), ready=self._is_ready)
        self._daemon("kube-proxy", *self._proxy_flags())
        corefile = self._folder / "Corefile"
        corefile.write_text(_COREFILE.format(address=BRIDGE_ADDRESS, kubeconfig=self.plane.kubeconfig))
        self._daemon("coredns", "-conf", str(corefile))
        self.plane.kubectl("apply", "-f", "-", stdin=json.dumps(_dns_objects()))
        self._wait_for_dns()

    def _daemon(self, program: str, *flags: str, ready: Callable[[], bool] = lambda: True) -> None:
        argv = [*self.prefix, str(self._assets / program), *flags]
        daemon = Daemon(program, argv, self._folder / f"{program}.log")
        self._running.callback(daemon.stop)
        daemon.start(ready)

    def _kubelet_flags(self) -> list[str]:
        folder = self._folder / "kubelet"
        config = self._folder / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_config()))
        return [
            f"--config={config}",
            f"--kubeconfig={self.plane.pki.kubeconfig('kubelet')}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={BRIDGE_ADDRESS}",
            f"--root-dir={folder}",
            f"--cert-dir={folder / 'pki'}",
        ]

    def _kubelet_config(self) -> dict[str, object]:
        found: dict[str, object] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": BRIDGE_ADDRESS,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.plane.pki.ca)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._cgroups.root,
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{self._containerd.socket}",
            "enforceNodeAllocatable": [],
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": str(self._folder / "pod-logs"),
            "resolvConf": "",
            "volumePluginDir": str(self._folder / "kubelet" / "volume-plugins"),
        }
        if not self._cgroups.is_v2:
            found["failCgroupV1"] = False
        return found

    def _proxy_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self.plane.pki.kubeconfig('kube-proxy')}",
            "--proxy-mode=iptables",
            f"--hostname-override={NODE_NAME}",
            f"--cluster-cidr={POD_CIDR}",
            "--conntrack-max-per-core=0",
        ]

    def _is_ready(self) -> bool:
        query = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        done = self.plane.kubectl("get", "node", NODE_NAME, "-o", query, check=False)
        return done.stdout == "True"

    def _wait_for_dns(self) -> None:
        end_s = time.monotonic() + READY_S
        while "10.96.0.1" not in self.run("getent", "hosts", "kubernetes.default", check=False):
            assert time.monotonic() < end_s, f"no DNS after {READY_S:.0f} s; see {self._folder}"
            time.sleep(0.1)


def _dns_objects() -> dict[str, object]:
    """The Service of the cluster's DNS, in front of the CoreDNS beside the kubelet."""
    meta = {"namespace": "kube-system"}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**meta, "name": "kube-dns"},
        "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**meta, "name": "kube-dns-host", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [BRIDGE_ADDRESS], "conditions": {"ready": True}}],
        "ports": ports,
    }
    return {"apiVersion": "v1", "kind": "List", "items": [service, endpoints]}
