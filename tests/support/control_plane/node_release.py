"""The chart's release on a real node, by the real helm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowprefill_crd.crd import CRD_NAME
from support.control_plane.node import Node
from support.helm import CHART, Helm, helm_program

RELEASE = "flowprefill"
OPERATOR = "flowprefill-operator"
NAMESPACE = "flowprefill-system"


class NodeRelease:
    """The operator as the chart installs it."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self.helm = Helm(helm_program(), folder, node.plane.kubeconfig)

    def kubectl(self, *args: str) -> str:
        """Run kubectl in the release's namespace; its output."""
        return self.node.plane.kubectl("--namespace", NAMESPACE, *args).stdout

    def restart(self) -> None:
        """Replace the operator's pod."""
        self.kubectl("rollout", "restart", f"deployment/{OPERATOR}")
        self.kubectl("rollout", "status", f"deployment/{OPERATOR}", "--timeout=100s")

    def upgrade(self, *args: str) -> None:
        """`helm upgrade` to the chart of this checkout; returns when its operator is at work."""
        self.helm(
            *("upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, "--wait", "--timeout", "100s", *args)
        )

    def logs(self) -> str:
        return self.kubectl("logs", f"deployment/{OPERATOR}", "--tail=50")


@contextmanager
def release(node: Node, folder: Path, *args: str, chart: Path = CHART) -> Iterator[NodeRelease]:
    """An installed release in a namespace under the restricted pod security standard; it goes with the node. `args` are
    further ones of `helm install`."""
    found = NodeRelease(node, folder)
    node.plane.kubectl("create", "namespace", NAMESPACE)
    node.plane.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    install = ("install", RELEASE, str(chart), "--namespace", NAMESPACE, "--wait", "--timeout", "100s")
    found.helm(*install, *args)
    node.plane.until_done("wait", "--for=condition=Established", "--timeout=60s", f"crd/{CRD_NAME}")
    yield found
