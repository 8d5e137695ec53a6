"""`vllm serve` as a process that a test starts, watches and stops."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from flowprefill.engines.tokenizer import load_tokenizer
from flowprefill_operator.node.ports import free_ports
from support.vllm.environment import environment
from support.vllm.usage import Usage, group, is_alive, tree, usage

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 120.0
POLL_S = 0.1
LOG_TAIL_LINES = 60
MAX_LEN = 32_768
LEFT_BY_STOCK = "/dev/shm/vllm_dist_"
"""Tensor-parallel ranks on CPUs never remove the memory that they reduce over (vLLM 0.32.0): not told, only removed."""


@dataclass(slots=True, kw_only=True)
class VllmServer:
    """A running server. `exit_code` is there once it has stopped, negative for the signal that it took."""

    process: subprocess.Popen[bytes]
    model: Path
    port: int
    log: Path
    exit_code: int | None = None
    _seen: dict[int, psutil.Process] = field(default_factory=dict)
    _shared_memory: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return "model"

    def client(self) -> httpx.AsyncClient:
        """A client of this server, for `async with`."""
        return httpx.AsyncClient(base_url=self.url, timeout=REQUEST_TIMEOUT_S)

    def usage(self) -> Usage:
        """What the server's processes hold now."""
        self._seen |= {process.pid: process for process in tree(self.process.pid)}
        now = usage(self.process.pid)
        self._shared_memory |= now.shared_memory
        return now

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:])

    def is_healthy(self) -> bool:
        """Whether it answers; raises AssertionError with the end of its log when it has ended."""
        code = self.process.poll()
        assert code is None, f"vllm serve ended with {code} before it was ready:\n{self.log_tail()}"
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_healthy():
            assert time.monotonic() < deadline, (
                f"vllm serve was not ready within {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}"
            )
            time.sleep(POLL_S)

    def stop(self) -> int:
        """Ask the server to end as Kubernetes does, and end what is left after a while; its exit code.

        Raises AssertionError when the server needed force, or left processes or shared memory behind.
        """
        self.usage()
        if self.exit_code is None and self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        forced = self.process.poll() is None
        self._seen |= {process.pid: process for process in group(self.process.pid)}
        below = [process for pid, process in self._seen.items() if pid != self.process.pid]
        _, left = psutil.wait_procs(below, timeout=0 if forced else STOP_TIMEOUT_S)
        self._end_all()
        self.exit_code = self.process.wait()
        remains = [path for path in self._release_shared_memory() if not path.startswith(LEFT_BY_STOCK)]
        assert not forced, (
            f"vllm serve did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM:\n{self.log_tail()}"
        )
        assert not left, f"vllm serve left processes behind: {[process.pid for process in left]}"
        assert not remains, f"vllm serve left shared memory behind: {remains}"
        return self.exit_code

    def _release_shared_memory(self) -> list[str]:
        """Remove the files in /dev/shm that the server's processes held and that are still there; their paths."""
        remains = sorted(path for path in self._shared_memory if os.path.exists(path))
        for path in remains:
            os.unlink(path)
        return remains

    def _end_all(self) -> None:
        """SIGKILL to the server, its process group and all that was ever seen below it."""
        self._seen |= {process.pid: process for process in group(self.process.pid)}
        for process in filter(is_alive, self._seen.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_TIMEOUT_S)  # before psutil does, which would take its exit code
        psutil.wait_procs(self._seen.values(), timeout=STOP_TIMEOUT_S)


@contextmanager
def vllm_server(
    python: Path,
    model: Path,
    log: Path,
    *,
    flags: Sequence[str] = (),
    additional_config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    compiled: bool = False,
    plugins: bool = False,
) -> Iterator[VllmServer]:
    """A ready server of the model in directory `model`; stopped, with nothing left behind, at the end.

    `flags` follow `stock_flags` and win. `plugins` lets vLLM load what its entry points name, and `additional_config` goes to
    those; without it the server is stock vLLM. `compiled` turns torch.compile on, which takes longer to start. The log is written to `log`. Raises ModelNotLoadable for a model without a tokenizer, AssertionError with the
    log's end when the server does not start.
    """
    load_tokenizer(model)
    (port,) = free_ports(1)
    command = [python.with_name("vllm"), "serve", model, *stock_flags(model, port), *flags]
    if not compiled:
        command.append("--enforce-eager")
    if additional_config is not None:
        command += ["--additional-config", json.dumps(additional_config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(python, compiled=compiled, plugins=plugins) | dict(env or {}),
            cwd=log.parent,
            start_new_session=True,
        )
    server = VllmServer(process=process, model=model, port=port, log=log)
    try:
        server.wait_until_healthy()
        yield server
    except BaseException:
        server.usage()
        server._end_all()
        server._release_shared_memory()
        raise
    server.stop()


def stock_flags(model: Path, port: int) -> list[str]:
    """What every server of a test is started with: one model, in float32, on a loopback port."""
    max_len = min(MAX_LEN, json.loads((model / "config.json").read_text())["max_position_embeddings"])
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"),
        *("--dtype", "float32", "--max-model-len", str(max_len)),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", str(max_len)),
        "--enable-prompt-tokens-details",
    ]
