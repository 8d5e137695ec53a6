"""The child as its API port shows it: whether it serves, and what its engine is busy with."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""How long an answer may take."""

MAX_METRICS_BYTES = 16 * 2**20

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
GENERATED = "vllm:generation_tokens_total"
STEPS = "vllm:iteration_tokens_total_count"
RECEIVED = "vllm:external_prefix_cache_hits_total"

_READ = (RUNNING, WAITING, GENERATED, STEPS, RECEIVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What vLLM says of itself, over all engines. `running` and `waiting` are requests now; the rest counts from its start.

    `num_received_tokens` are prompt tokens whose KV came from another pod, `num_steps` passes of the engine.
    """

    running: int
    waiting: int
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_received_tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.running + self.waiting


class ApiServer:
    """vLLM's HTTP server on this machine."""

    def __init__(self, host: str, port: int) -> None:
        """`host` is the address that it listens on."""
        reached = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{reached}]" if ":" in reached else reached
        self._client = httpx.AsyncClient(
            base_url=f"http://{shown}:{port}",
            timeout=PROBE_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=2, max_keepalive_connections=0),
        )

    async def healthy(self) -> bool:
        """Whether it takes requests."""
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def load(self) -> EngineLoad | None:
        """What its engine is busy with; None when it does not say."""
        try:
            async with self._client.stream("GET", "/metrics") as answer:
                if answer.status_code != 200:
                    return None
                text = bytearray()
                async for part in answer.aiter_bytes():
                    text += part
                    if len(text) > MAX_METRICS_BYTES:
                        log.warning("vLLM's metrics are too long", extra={"limit_bytes": MAX_METRICS_BYTES})
                        return None
        except httpx.HTTPError:
            return None
        return engine_load(text.decode(errors="replace"))

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()


def engine_load(metrics: str) -> EngineLoad | None:
    """The load that vLLM's metrics tell of; None when they tell nothing."""
    lines = [line for line in metrics.splitlines() if line.startswith(_READ)]
    found: Counter[str] = Counter()
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                found[sample.name] += round(sample.value)
    except (ValueError, OverflowError):
        return None
    if RUNNING not in found or WAITING not in found:
        return None
    return EngineLoad(
        running=found[RUNNING],
        waiting=found[WAITING],
        num_generated_tokens=found[GENERATED],
        num_steps=found[STEPS],
        num_received_tokens=found[RECEIVED],
    )
