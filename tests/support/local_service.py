"""Services of stand-in pods for tests of the local node and its commands."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from flowprefill_operator.node.state import NodeStatus, StateDir

STANDIN = Path(__file__).with_name("standin_pod.py")
FAST_STOP = {"preStopSeconds": 0, "lameDuckSeconds": 0, "drainSeconds": 0}
TIMEOUT_S = 60.0


def document(switches: Path, *, name: str = "demo", **spec: Any) -> dict[str, Any]:
    """A FlowPrefillService whose containers run the stand-in; keywords replace parts of the spec."""
    body: dict[str, Any] = {
        "model": {"uri": "embedded://none"},
        "engine": {"type": "simulated"},
        "sloClasses": [{"name": "chat", "ttftMilliseconds": 500, "default": True}],
        "termination": FAST_STOP,
    }
    body |= copy.deepcopy(spec)
    for role in ("prefill", "decode", "proxy"):
        container = {
            "name": role,
            "command": ["python", f"/standin/{STANDIN.name}"],
            "env": [{"name": "SWITCHES", "value": "/switches"}],
            "volumeMounts": [
                {"name": "switches", "mountPath": "/switches"},
                {"name": "standin", "mountPath": "/standin"},
            ],
            "livenessProbe": {"periodSeconds": 1, "failureThreshold": 1},
            "readinessProbe": {"periodSeconds": 1, "failureThreshold": 1},
        }
        volumes = [
            {"name": "switches", "hostPath": {"path": str(switches)}},
            {"name": "standin", "hostPath": {"path": str(STANDIN.parent)}},
        ]
        body.setdefault(role, {})["podTemplate"] = {"spec": {"containers": [container], "volumes": volumes}}
    return {
        "apiVersion": "flowprefill.io/v1alpha1",
        "kind": "FlowPrefillService",
        "metadata": {"name": name},
        "spec": body,
    }


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits for its parent to take note of its end does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class LocalService:
    """One service on this machine, driven by the command line as a user does. `close` leaves nothing behind."""

    def __init__(self, folder: Path, *, name: str = "demo") -> None:
        self.root = folder / "state"
        self.switches = folder / "switches"
        self.switches.mkdir(exist_ok=True)
        self.file = folder / f"{name}.yaml"
        self.state = StateDir(self.root, namespace="default", name=name)
        self.name = name
        self._foreground: list[subprocess.Popen[str]] = []

    def write(self, **spec: Any) -> None:
        """Write the service's file."""
        self.file.write_text(yaml.safe_dump(document(self.switches, name=self.name, **spec)))

    def switch(self, name: str, *, on: bool = True) -> None:
        path = self.switches / name
        path.touch() if on else path.unlink(missing_ok=True)

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        done = subprocess.run(self._argv(*args), capture_output=True, text=True, timeout=120, check=False)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def up(self, *args: str) -> None:
        """Bring the service up in the background, on any free port unless told otherwise."""
        port = () if "--port" in args else ("--port", "0")
        self.run("up", "-f", str(self.file), "--detach", *port, "--timeout", str(TIMEOUT_S), *args)

    def up_in_foreground(self) -> subprocess.Popen[str]:
        return self.start("up", "-f", str(self.file), "--port", "0")

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a command that goes on; ended by `close` if not before."""
        process = subprocess.Popen(
            self._argv(*args),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._foreground.append(process)
        return process

    @property
    def status(self) -> NodeStatus:
        found = self.state.read_status()
        assert found is not None, "no status was written"
        return found

    def until(self, holds: Callable[[NodeStatus], bool], what: str) -> NodeStatus:
        """Wait until the status has a property."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            status = self.state.read_status()
            if status is not None and holds(status):
                return status
            time.sleep(0.02)
        raise AssertionError(f"not within {TIMEOUT_S:g} s: {what}; last seen {self.state.read_status()}")

    def pods(self, role: str) -> list[Any]:
        return [pod for pod in self.status.pods if pod.role == role]

    def get(self, url: str | None = None) -> Any:
        """What the API (or the URL) answers, as JSON."""
        with urllib.request.urlopen(url or self.status.url, timeout=10) as answer:
            return json.load(answer)

    def processes(self) -> list[psutil.Process]:
        """Every process on this machine that belongs to this service."""
        mark = {str(self.root), str(self.switches)}
        found = []
        for process in psutil.process_iter():
            if process.pid == os.getpid():
                continue
            try:
                words = " ".join(process.cmdline())
                environment = process.environ().get("SWITCHES", "")
            except psutil.Error:
                continue
            if alive(process) and (environment in mark or any(path in words for path in mark)):
                found.append(process)
        return found

    def close(self) -> None:
        for process in self._foreground:
            process.kill()
            process.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            down = self._argv("down", self.name, "--now")
            subprocess.run(down, capture_output=True, timeout=60, check=False)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "flowprefill.cli", *args, "--state-dir", str(self.root)]
