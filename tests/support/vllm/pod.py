"""`flowprefill serve` around vLLM as a process that a test starts, watches and stops: a prefill or decode pod as in a cluster."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from flowprefill.wire import Endpoint, PodState
from flowprefill_operator.node.ports import free_ports
from support.pods import live_config, pod_config
from support.vllm.environment import environment
from support.vllm.samples import Samples, samples
from support.vllm.server import LOG_TAIL_LINES, POLL_S, REQUEST_TIMEOUT_S, START_TIMEOUT_S
from support.vllm.usage import group, is_alive, tree

STOP_TIMEOUT_S = 40.0
LONG_TTFT_S, SHORT_TTFT_S = 60.0, 5.0
"""Far apart, and neither out of reach on a machine that has other work: who cannot be in time overtakes nobody."""

LIVE = {
    "generation": 1,
    "policy": "s-edf",
    "sloClasses": [
        {
            "name": name,
            "ttftMilliseconds": round(ttft_s * 1000),
            "minTtftMilliseconds": 1,
            "maxTtftMilliseconds": 600_000,
            "default": name == "chat",
        }
        for name, ttft_s in (("chat", SHORT_TTFT_S), ("batch", LONG_TTFT_S))
    ],
}


@dataclass(slots=True, kw_only=True)
class VllmPod:
    """A running pod with its three ports."""

    process: subprocess.Popen[bytes]
    role: str
    port: int
    admin_port: int
    log: Path

    @property
    def endpoint(self) -> Endpoint:
        """As discovery tells the proxy of it."""
        return Endpoint(
            name=f"{self.role}-0",
            role=self.role,
            revision="r1",
            address=f"127.0.0.1:{self.port}",
            admin=f"127.0.0.1:{self.admin_port}",
        )

    def client(self) -> httpx.AsyncClient:
        """A client of the API port, for `async with`."""
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_TIMEOUT_S)

    def metrics(self) -> Samples:
        """The pod's own metrics now."""
        return samples(httpx.get(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10).text)

    @asynccontextmanager
    async def states(self) -> AsyncIterator[AsyncIterator[PodState]]:
        """The state stream, from the present state on."""
        url = f"http://127.0.0.1:{self.admin_port}/v1/state"
        async with (
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client,
            client.stream("GET", url) as answer,
        ):
            yield (PodState.model_validate_json(line) async for line in answer.aiter_lines() if line)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:])

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            assert time.monotonic() < deadline, f"no {self.role} pod in time:\n{self.log_tail()}"
            time.sleep(POLL_S)

    def stop(self) -> None:
        """SIGTERM; raises AssertionError when it does not end with 0 or leaves processes behind."""
        below = tree(self.process.pid)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        code = self.process.poll()
        left = [process.pid for process in below if is_alive(process) and process.pid != self.process.pid]
        self.kill()
        assert code == 0, f"the {self.role} pod ended with {code}:\n{self.log_tail()}"
        assert not left, f"the {self.role} pod left processes behind: {left}"

    def kill(self) -> None:
        """SIGKILL to all that is left of it."""
        for process in {*tree(self.process.pid), *group(self.process.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def _is_ready(self) -> bool:
        code = self.process.poll()
        assert code is None, f"the {self.role} pod ended with {code} before it was ready:\n{self.log_tail()}"
        try:
            return httpx.get(f"http://127.0.0.1:{self.admin_port}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def vllm_pod(
    python: Path,
    model: Path,
    directory: Path,
    role: str,
    *,
    flags: Sequence[str] = (),
    kv_cache_tokens: int,
    max_model_len: int,
    lease_s: int = 60,
    env: Mapping[str, str] | None = None,
) -> Iterator[VllmPod]:
    """A ready pod of the model in directory `model`, in float32 with blocks of 32 tokens; its files are in `directory`.

    It starts with a rough idea of prefill times, which saves a quarter of a minute.

    `flags` are flags of `vllm serve`. Stopped at the end, or killed when the test has failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, live_file, log = directory / "config.json", directory / "live.json", directory / "log"
    config.write_text(
        pod_config(
            model={"uri": model.as_uri(), "servedName": "model", "maxModelLen": max_model_len},
            engine={
                "type": "vllm",
                "dtype": "float32",
                "blockSize": 32,
                "kvCacheTokens": kv_cache_tokens,
                "args": list(flags),
            },
            predictor={"warmup": False},
            kvTransfer={"leaseSeconds": lease_s, "timeoutSeconds": min(lease_s, 30)},
            logFormat="text",
        ).to_json()
    )
    live_file.write_text(live_config(**LIVE).to_json())
    port, admin_port, kv_port = free_ports(3)
    command = [
        *(python.with_name("flowprefill"), "serve", "--role", role),
        *("--config", config, "--live", live_file, "--host", "127.0.0.1"),
        *("--port", port, "--admin-port", admin_port, "--kv-port", kv_port),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(python, plugins=True) | dict(env or {}),
            cwd=directory,
            start_new_session=True,
        )
    pod = VllmPod(process=process, role=role, port=port, admin_port=admin_port, log=log)
    try:
        pod.wait_until_ready()
        yield pod
    except BaseException:
        pod.kill()
        raise
    pod.stop()


def kv_transfer(connector: str, role: str | None = None, **extra: Any) -> list[str]:
    """The flag that names a KV connector; a pod adds the `role` by itself."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_connector_extra_config": extra}
    if role is not None:
        config["kv_role"] = role
    if connector == "NixlConnector":
        config["kv_buffer_device"] = "cpu"
    return ["--kv-transfer-config", json.dumps(config)]
