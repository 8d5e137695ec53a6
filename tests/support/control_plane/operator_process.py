"""The operator as a process of its own, with the rights of its ServiceAccount, which a case kills and starts again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import yaml

from flowprefill_operator.node.ports import free_ports
from support.control_plane.operator_identity import ACCOUNT, SYSTEM_NAMESPACE

Json = dict[str, Any]

READY_S = 60.0
STOP_S = 30.0
POLL_S = 0.05


class OperatorProcess:
    """`flowprefill operator`. Start and end it with `with`, or by its methods; it can be started again after its end."""

    def __init__(
        self, kubeconfig: Path, folder: Path, *, pod_name: str = f"{ACCOUNT}-0", **config: object
    ) -> None:
        """`config` holds fields of the operator's configuration file (camelCase) beyond those that a test needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (self._port,) = free_ports(1)
        self.kubeconfig = kubeconfig
        self._pod_name = pod_name
        self._file = folder / "operator.yaml"
        self.log = folder / "operator.log"
        self.log.touch()
        self._config: Json = {
            "port": self._port,
            "logFormat": "json",
            "leaderElection": {"enabled": False},
        }
        self.configure(**config)
        self._process: subprocess.Popen[bytes] | None = None
        self.python_path: str | None = None
        """Where the next start takes its modules from first; None for those that are installed."""
        self.memory_peak_bytes = 0
        """Most resident memory of any process so far, as read by the last `memory` or at its end."""

    def __enter__(self) -> OperatorProcess:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where its /healthz, /readyz and /metrics are."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def configure(self, **config: object) -> None:
        """Change fields of the configuration file, for the next start."""
        self._config |= config
        self._file.write_text(yaml.safe_dump(self._config), encoding="utf-8")

    def start(self) -> None:
        """Start it, without waiting for anything."""
        assert not self.running, "it runs already"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._file.parent),
            "KUBECONFIG": str(self.kubeconfig),
            "POD_NAME": self._pod_name,
            "POD_NAMESPACE": SYSTEM_NAMESPACE,
            "PYTHONUNBUFFERED": "1",
        }
        if self.python_path is not None:
            environment["PYTHONPATH"] = self.python_path
        command = [sys.executable, "-m", "flowprefill.cli", "operator", "--config", str(self._file)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until /readyz says so. Fails with the end of its log."""
        end_s = time.monotonic() + timeout_s
        while not self.answers("/readyz"):
            assert self.running, f"the operator ended with {self.exit_status}:\n{self.tail()}"
            assert time.monotonic() < end_s, (
                f"the operator is not ready after {timeout_s:.0f} s:\n{self.tail()}"
            )
            time.sleep(POLL_S)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """SIGKILL, at once; may be called from any thread and more than once."""
        if self._process is not None:
            self.memory()
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for its end; its exit status, negative when a signal ended it."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL; its exit status."""
        if self._process is None:
            return None
        if self.running:
            self.memory()
            self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"the operator did not stop in {STOP_S:.0f} s:\n{self.tail()}") from None

    def restart(self) -> None:
        """Stop it if it runs, start it and wait until it is ready."""
        self.stop()
        self.start()
        self.wait_ready()

    def memory(self) -> int:
        """Most resident memory in bytes so far: the kernel's own peak on Linux, else what it uses now."""
        found = 0
        status = Path(f"/proc/{self.pid}/status")
        with contextlib.suppress(OSError, psutil.Error):
            peak = (
                re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
                if status.exists()
                else None
            )
            found = int(peak[1]) * 1024 if peak else psutil.Process(self.pid).memory_info().rss
        self.memory_peak_bytes = max(self.memory_peak_bytes, found)
        return self.memory_peak_bytes

    def metrics(self) -> str:
        """The text of /metrics."""
        return httpx.get(f"{self.url}/metrics", trust_env=False).text

    def lines(self) -> list[Json]:
        """Its log so far, a dict a line; what is no JSON becomes `{"text": ...}`."""
        found: list[Json] = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                found.append({"text": line})
        return found

    def tail(self, num_bytes: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def answers(self, path: str) -> bool:
        """Whether the path of its own port answers 200."""
        try:
            return httpx.get(f"{self.url}{path}", trust_env=False, timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False
