"""A FlowPrefillService on a real node: what its owner does and its clients see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from flowprefill_crd.generate import ROOT
from support.control_plane.node import Node
from support.control_plane.waiting import until
from support.steady_load import STOP_S, Outcome, read

READY_S = 400.0
"""Until two pods on busy cores have loaded a model, measured it and shown that they serve."""
REQUEST_S = 120.0
STOPPED_S = 150.0

Json = dict[str, Any]


class NodeService:
    """One service in one namespace of a node."""

    def __init__(self, node: Node, namespace: str, name: str) -> None:
        self.node = node
        self.namespace = namespace
        self.name = name

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Run kubectl in the service's namespace; its output."""
        return self.node.plane.kubectl("--namespace", self.namespace, *args, stdin=stdin).stdout

    def get(self) -> Json:
        return self.node.plane.get("--namespace", self.namespace, "fps", self.name)

    @property
    def url(self) -> str:
        """Where clients in the cluster reach it, as its status says."""
        return str(self.get()["status"]["url"])

    def apply(self, body: Json) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    def change(self, spec: Json) -> None:
        """Change the spec by a merge patch."""
        self.kubectl("patch", "fps", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self) -> None:
        """Delete it and wait until its pods have ended, which they do in their own time."""
        self.kubectl("delete", "fps", self.name, "--ignore-not-found")
        selector = f"flowprefill.io/service={self.name}"
        get = ("--namespace", self.namespace, "get", "pods", "-l", selector, "-o", "name")
        until(lambda: not self.node.plane.kubectl(*get).stdout, f"no pod of {self.name}", within_s=STOPPED_S)

    def wait_for(self, condition: str, *, within_s: float = READY_S) -> None:
        """Wait until a condition of the present generation is true; fails with what the service says."""
        wanted = f"--for=condition={condition}"

        def true() -> bool:
            done = self.node.plane.kubectl(
                "--namespace",
                self.namespace,
                *("wait", wanted, f"fps/{self.name}", "--timeout=60s"),
                check=False,
            )
            return done.returncode == 0

        try:
            until(true, condition, within_s=within_s)
        except AssertionError:
            raise AssertionError(f"no {condition} within {within_s:.0f} s\n{self.told()}") from None

    def wait_ready(self) -> None:
        """Wait until the service is Ready as it is specified now, with one revision and all its pods."""
        self.wait_for("Ready")
        until(self._is_settled, f"the pods of one revision of {self.name}", within_s=READY_S)

    def pods(self, role: str | None = None) -> list[Json]:
        """Its pods that are to stay."""
        selector = f"flowprefill.io/service={self.name}" + (f",flowprefill.io/role={role}" if role else "")
        found = self.node.plane.get("--namespace", self.namespace, "pods", "-l", selector)
        return [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]

    def lives(self, role: str | None = None) -> dict[str, int]:
        """Restarts of each pod by its uid: equal as long as nothing was started again."""
        return {
            pod["metadata"]["uid"]: sum(
                status["restartCount"] for status in pod["status"].get("containerStatuses", ())
            )
            for pod in self.pods(role)
        }

    def ask(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Ask for a completion as `support.completion ARGS` from the node's network."""
        return subprocess.run(
            self._program("support.completion", self.url, *args),
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=REQUEST_S,
            check=False,
        )

    def post(self, body: Json) -> subprocess.Popen[str]:
        """A completion under way, by curl in the node's network: head and body of the answer on standard output."""
        argv = ["curl", "--silent", "--show-error", "--include", "--max-time", f"{REQUEST_S:.0f}"]
        argv += ["--header", "content-type: application/json", "--data", json.dumps(body)]
        return subprocess.Popen(
            self.node.client(*argv, f"{self.url}/completions"), stdout=subprocess.PIPE, text=True
        )

    def metric(self, pod: Json, name: str, /, **labels: str) -> float:
        """A sample of a pod's metrics; 0 while there is none."""
        address = pod["status"]["podIP"]
        said = self.node.run(
            "curl", "--silent", "--show-error", "--max-time", "10", f"http://{address}:9000/metrics"
        )
        for family in text_string_to_metric_families(said):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return 0.0

    @contextmanager
    def load(self, out: Path, *, rate: float, stream_s: float | None = None) -> Iterator[list[Outcome]]:
        """A steady load while the block runs; the list has every outcome once it has ended. Streams are of 40 tokens, or
        of about `stream_s` seconds."""
        outcomes: list[Outcome] = []
        model = str(self.get()["status"]["resolvedModel"]["servedName"])
        # Short enough to end within a proxy's drain also while new pods load their model beside them.
        argv = self._program(
            "support.steady_load", self.url, model, str(out), "--rate", str(rate), "--stream-tokens", "40"
        )
        argv += [] if stream_s is None else ["--stream-seconds", str(stream_s)]
        process = subprocess.Popen(argv, env=_environment(), stderr=subprocess.PIPE, text=True)
        try:
            yield outcomes
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=STOP_S + 30.0)
        assert process.returncode == 0, said
        outcomes += read(out)

    def told(self) -> str:
        """What the service, its pods and their logs say, for a failure's message."""
        lines = [
            f"{c['type']}={c['status']} {c['reason']}: {c['message']}"
            for c in self.get().get("status", {}).get("conditions", ())
        ]
        selector = f"flowprefill.io/service={self.name}"
        kubectl = self.node.plane.kubectl
        pods = kubectl("--namespace", self.namespace, "get", "pods", "-o", "wide", check=False).stdout
        logs = kubectl(
            *("--namespace", self.namespace, "logs", "--prefix", "-l", selector, "--tail=15"), check=False
        ).stdout
        return "\n".join([*lines, pods, logs])

    def _is_settled(self) -> bool:
        roles = self.get()["status"]["roles"]
        revisions = {role["revision"] for role in roles.values()}
        ready = all(role["readyReplicas"] == role["replicas"] for role in roles.values())
        present = {pod["metadata"]["labels"].get("flowprefill.io/revision") for pod in self.pods("prefill")}
        return ready and len(revisions) == 1 and present == revisions

    def _program(self, module: str, *args: str) -> list[str]:
        return self.node.client(sys.executable, "-m", module, *args)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
