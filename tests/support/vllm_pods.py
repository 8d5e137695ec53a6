"""Pods of the vLLM engine with a stand-in for `vllm serve` (`fake_vllm`), inside the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from flowprefill.engines.models import ResolvedModel
from flowprefill.hosting.documents import LiveDocument
from flowprefill.server.settings import checked
from flowprefill.server.vllm.channel import FromCore
from flowprefill.server.vllm.pod import VllmPod
from flowprefill.server.vllm.preparing import Prepared
from flowprefill_crd import PodConfig
from support.pods import live_config, pod_config, until, until_async

LIMIT_S = 120.0
"""Four interpreters start one after another, on a machine that may be busy."""


def prepared(config: PodConfig, role: str, device: str) -> Prepared:
    """A model of which nothing is read."""
    model = ResolvedModel(path=Path("/models/m"), name="m", revision="0")
    return Prepared(model=model, model_len=4096, kv_cache_tokens=8192, kv_bytes=2**20, profile=None)


@dataclass(slots=True, kw_only=True)
class FakePod:
    """A pod around the stand-in; `switches` is the folder that decides how the stand-in behaves."""

    pod: VllmPod
    switches: Path
    live_path: Path
    running: asyncio.Task[int]
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    @property
    def admin(self) -> httpx.AsyncClient:
        if not self.clients:
            self.clients.append(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.pod.admin_port}", timeout=30)
            )
        return self.clients[0]

    @property
    def started(self) -> dict[str, Any]:
        """What the stand-in wrote of itself."""
        body: dict[str, Any] = json.loads((self.switches / "started.json").read_text())
        return body

    async def until_child_runs(self) -> None:
        await until((self.switches / "started.json").exists, what="the child runs", limit_s=LIMIT_S)

    def switch(self, name: str, text: str = "") -> None:
        (self.switches / name).write_text(text)

    def tell(self, *messages: FromCore) -> None:
        """Have the engine core send these."""
        unfinished = self.switches / "messages.tmp"
        unfinished.write_bytes(pickle.dumps(messages))
        os.replace(unfinished, self.switches / "messages")

    def set_live(self, **changes: Any) -> None:
        unfinished = self.live_path.with_suffix(".tmp")
        unfinished.write_text(live_config(**changes).to_json())
        os.replace(unfinished, self.live_path)

    async def until_ready(self) -> None:
        await until(lambda: self.pod.ready.is_set() or self.running.done(), what="ready", limit_s=LIMIT_S)
        if self.running.done():
            self.running.result()

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name` whose labels include `labels`."""
        text = (await self.admin.get("/metrics")).text
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        async def has() -> bool:
            return await self.metric(name, **labels) == value

        await until_async(has, what=f"{name} == {value}")

    async def state(self) -> dict[str, Any]:
        """The first line of a new state stream."""
        async with self.admin.stream("GET", "/v1/state") as answer:
            async for line in answer.aiter_lines():
                body: dict[str, Any] = json.loads(line)
                return body
        raise AssertionError("no state came")

    def survivors(self) -> list[int]:
        """Processes of the child's that still run."""
        known = [self.started["pid"], self.started["core"], self.started["keeper"]]
        return [pid for pid in known if runs(pid)]


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def fake_pod(
    tmp_path: Path,
    role: str = "colocated",
    *,
    args: tuple[str, ...] = (),
    live_changes: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[FakePod]:
    """A pod whose child has been asked for; stopped in a hurry afterwards."""
    switches, live_path = tmp_path / "switches", tmp_path / "live.json"
    switches.mkdir()
    live_path.write_text(live_config(**(live_changes or {})).to_json())
    os.environ["FAKE_VLLM"] = str(switches)
    body = {"engine": {"type": "vllm"}, "model": {"uri": "file:///models/m", "servedName": "m"}} | config
    pod = VllmPod(
        role,  # type: ignore[arg-type]
        pod_config(**body),
        LiveDocument(live_path, checked),
        host="127.0.0.1",
        port=0,
        admin_port=0,
        kv_port=0,
        device="cpu",
        extra=args,
        handle_signals=False,
        program=(sys.executable, str(Path(__file__).with_name("fake_vllm.py"))),
        prepare=prepared,
    )
    running = asyncio.ensure_future(pod.run())
    fake = FakePod(pod=pod, switches=switches, live_path=live_path, running=running)
    try:
        await until(
            lambda: pod.child is not None or running.done(), what="the child is asked for", limit_s=LIMIT_S
        )
        if running.done():
            running.result()
        yield fake
    finally:
        for client in fake.clients:
            await client.aclose()
        pod.stop()
        pod.stop()
        await asyncio.wait({running})
        del os.environ["FAKE_VLLM"]
