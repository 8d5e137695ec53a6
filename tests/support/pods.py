"""Pods inside the test's own process and event loop, on the simulated engine and free ports."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import Engine
from flowprefill.engines.simulated.cost import CostModel
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.engines.simulated.presets import preset
from flowprefill.hosting.documents import LiveDocument
from flowprefill.server.loading import Loaded, assemble
from flowprefill.server.main import PodServer
from flowprefill.server.settings import checked
from flowprefill_crd import LiveConfig, PodConfig

MODEL = "test-model"
EOS = 7


class WordTokenizer:
    """One token a character; token t has the text `<t>` unless it is a printable ASCII character."""

    vocab_size = 1000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % self.vocab_size for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t) if 32 <= t < 127 else f"<{t}>" for t in token_ids)


def simulated_engine(
    *,
    cost: CostModel | None = None,
    num_kv_blocks: int = 512,
    max_model_len: int = 4096,
    revision: str = "0",
    vocab_size: int = WordTokenizer.vocab_size,
) -> SimulatedEngine:
    return SimulatedEngine(
        preset("tiny") if cost is None else cost,
        MonotonicClock(),
        num_kv_blocks=num_kv_blocks,
        block_size=16,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        revision=revision,
    )


def pod_config(**changes: Any) -> PodConfig:
    body: dict[str, Any] = {
        "service": "svc",
        "namespace": "default",
        "revision": "r1",
        "mode": "Disaggregated",
        "model": {"uri": "simulated://tiny", "servedName": MODEL},
        "engine": {"type": "simulated"},
        "termination": {"preStopSeconds": 0, "lameDuckSeconds": 0, "drainSeconds": 20},
    }
    return PodConfig.from_json(json.dumps(body | changes))


def live_config(**changes: Any) -> LiveConfig:
    body: dict[str, Any] = {
        "generation": 1,
        "sloClasses": [
            {
                "name": "chat",
                "ttftMilliseconds": 500,
                "minTtftMilliseconds": 50,
                "maxTtftMilliseconds": 5000,
                "default": True,
            },
            {
                "name": "document",
                "ttftMilliseconds": 5000,
                "minTtftMilliseconds": 500,
                "maxTtftMilliseconds": 50000,
            },
        ],
    }
    return LiveConfig.from_json(json.dumps(body | changes))


@dataclass(slots=True, kw_only=True)
class RunningPod:
    """A pod that is ready. `api` and `admin` are clients of its two ports."""

    server: PodServer
    engine: Engine
    api: httpx.AsyncClient
    admin: httpx.AsyncClient
    live_path: Path
    running: asyncio.Task[None]

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name` whose labels include `labels`."""
        text = (await self.admin.get("/metrics")).text
        total = 0.0
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until the metric has this value."""
        await until_async(lambda: self._is(name, value, labels), what=f"{name} == {value}")

    async def _is(self, name: str, value: float, labels: dict[str, str]) -> bool:
        return await self.metric(name, **labels) == value


@asynccontextmanager
async def running_pod(
    role: str,
    tmp_path: Path,
    *,
    engine: Engine | None = None,
    config: PodConfig | None = None,
    live: LiveConfig | None = None,
    tokenizer: Any = None,
) -> AsyncIterator[RunningPod]:
    """A ready pod; it is stopped, and its `run` has returned, afterwards."""
    engine = simulated_engine() if engine is None else engine
    config = pod_config() if config is None else config
    live_path = tmp_path / f"live-{role}-{time.monotonic_ns()}.json"
    live_path.write_text((live or live_config()).to_json())
    words = WordTokenizer() if tokenizer is None else tokenizer

    def load(config: PodConfig, role: str) -> Loaded:
        return assemble(config, role, engine, words, began_s=time.monotonic())

    server = PodServer(
        role,  # type: ignore[arg-type]
        config,
        LiveDocument(live_path, checked),
        host="127.0.0.1",
        port=0,
        admin_port=0,
        kv_port=0,
        handle_signals=False,
        load=load,
    )
    running = asyncio.ensure_future(server.run())
    ready = asyncio.ensure_future(server.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.api_port}", timeout=60) as api,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.admin_port}", timeout=60) as admin,
    ):
        try:
            yield RunningPod(
                server=server, engine=engine, api=api, admin=admin, live_path=live_path, running=running
            )
        finally:
            server.stop()
            server.stop()
            await running


async def until(condition: Callable[[], bool], *, what: str = "condition", limit_s: float = 30.0) -> None:
    """Wait for a condition; the limit is a safety net, not a claim about speed."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {limit_s} s in vain for: {what}"
        await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Any], *, what: str, limit_s: float = 30.0) -> None:
    """As `until`, for a condition that awaits."""
    end_s = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < end_s, f"waited {limit_s} s in vain for: {what}"
        await asyncio.sleep(0.01)


def prefill_leg(prompt: Any, **changes: Any) -> dict[str, Any]:
    """A prefill leg as the proxy sends it."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "stream": False,
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True},
    } | changes


def expected_tokens(engine: SimulatedEngine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer, computed without any KV. Stops after an end-of-text token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(engine.next_token_id(tokens))
        if tokens[-1] in engine.spec.eos_token_ids:
            break
    return tokens[len(prompt) :]


def expected_text(engine: SimulatedEngine, prompt: str, num_tokens: int) -> str:
    """As `expected_tokens`, as text without the end-of-text token."""
    words = WordTokenizer()
    tokens = expected_tokens(engine, words.encode(prompt), num_tokens)
    return words.decode([t for t in tokens if t not in engine.spec.eos_token_ids])


def decode_leg(prompt: Any, params: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A decode leg: the client's request with the prefill leg's parameters."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "kv_transfer_params": dict(params),
    } | changes


async def prefilled(pod: RunningPod, prompt: Any, **changes: Any) -> dict[str, Any]:
    """Run a prefill leg; returns its kv_transfer_params."""
    answer = await pod.api.post("/v1/completions", json=prefill_leg(prompt, **changes))
    assert answer.status_code == 200, answer.text
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


@asynccontextmanager
async def running_pair(
    tmp_path: Path, *, prefill: Engine | None = None, decode: Engine | None = None, **config: Any
) -> AsyncIterator[tuple[RunningPod, RunningPod]]:
    """A prefill and a decode pod of one revision."""
    shared = pod_config(**config)
    async with (
        running_pod("prefill", tmp_path, engine=prefill, config=shared) as p,
        running_pod("decode", tmp_path, engine=decode, config=shared) as d,
    ):
        yield p, d


def stream_events(text: str) -> list[Any]:
    """The JSON events of a stream; asserts that it ended with [DONE]."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1:]
    return [json.loads(line) for line in lines[:-1]]
