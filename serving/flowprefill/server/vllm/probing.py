"""The child as its API port shows it: whether it serves, and how many requests it has."""

from __future__ import annotations

import re

import httpx

PROBE_S = 5.0
"""How long an answer may take."""

MAX_METRICS_BYTES = 16 * 2**20

_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)


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

    async def in_flight(self) -> int | None:
        """Requests that run or wait in the engine; None when it does not say."""
        try:
            async with self._client.stream("GET", "/metrics") as answer:
                if answer.status_code != 200:
                    return None
                text = b""
                async for part in answer.aiter_bytes():
                    text += part
                    if len(text) > MAX_METRICS_BYTES:
                        return None
        except httpx.HTTPError:
            return None
        return num_in_flight(text.decode(errors="replace"))

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()


def num_in_flight(metrics: str) -> int | None:
    """The requests that vLLM's metrics tell of, over all engines; None when they tell nothing."""
    values = [float(value) for value in _IN_FLIGHT.findall(metrics)]
    return round(sum(values)) if values else None
