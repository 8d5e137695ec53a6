"""A proxy on real sockets in the test's own event loop, with its documents in a temporary directory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from flowprefill.hosting.auth import KeyFile
from flowprefill.hosting.documents import LiveDocument, read_pod_config
from flowprefill.proxy.discovery import FileDiscovery
from flowprefill.proxy.main import Proxy
from flowprefill.proxy.settings import live_settings, proxy_settings
from flowprefill.wire import Endpoint, EndpointsFile
from support.proxy_pods import HOST, FakeColocated, FakeDecode, FakePod, FakePrefill, serving, until

LIVE: dict[str, Any] = {
    "generation": 1,
    "policy": "s-edf",
    "sloClasses": [
        {
            "name": "chat",
            "ttftMilliseconds": 1000,
            "minTtftMilliseconds": 500,
            "maxTtftMilliseconds": 4000,
            "objective": "99",
            "default": True,
            "serviceTiers": ["priority"],
        },
        {
            "name": "batch",
            "ttftMilliseconds": 20000,
            "minTtftMilliseconds": 10000,
            "maxTtftMilliseconds": 80000,
            "serviceTiers": ["flex"],
        },
        {
            "name": "strict",
            "ttftMilliseconds": 200,
            "minTtftMilliseconds": 100,
            "maxTtftMilliseconds": 800,
            "shedWhenInfeasible": True,
        },
    ],
}

CONFIG: dict[str, Any] = {
    "service": "demo",
    "namespace": "default",
    "revision": "r1",
    "mode": "Disaggregated",
    "model": {"uri": "embedded://tiny", "servedName": "tiny"},
    "engine": {"type": "simulated"},
    "proxy": {"queueLimit": 100, "maxBodyBytes": 1_000_000, "requestTimeoutSeconds": 20},
    "termination": {"preStopSeconds": 0, "lameDuckSeconds": 0, "drainSeconds": 10},
    "logFormat": "text",
}


def write(path: Path, text: str) -> None:
    """Replace a file atomically, as the local node and kubelet do."""
    staged = path.with_name(path.name + ".new")
    staged.write_text(text)
    os.replace(staged, path)


@dataclass
class Running:
    """A proxy that serves, and where its documents are."""

    proxy: Proxy
    url: str
    admin_url: str
    directory: Path
    http: httpx.AsyncClient
    task: asyncio.Task[None]

    def write_live(self, document: dict[str, Any] | str) -> None:
        write(self.directory / "live.json", document if isinstance(document, str) else json.dumps(document))

    def write_endpoints(self, endpoints: Sequence[Endpoint] | str) -> None:
        text = endpoints if isinstance(endpoints, str) else _endpoints(endpoints)
        write(self.directory / "endpoints.json", text)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(self.url + path, json=body, **options)

    async def complete(self, prompt: Any = "a b c", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, **fields}
        return await self.post("/v1/completions", body, headers=body.pop("headers", None))

    async def metrics(self) -> dict[str, float]:
        """Samples by `name{label=value,...}`, without the labels that are always the same."""
        text = (await self.http.get(self.admin_url + "/metrics")).text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("service", "model_name")}
                shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                samples[f"{sample.name}{{{shown}}}"] = sample.value
        return samples

    async def until_sample(self, name: str, value: float) -> None:
        """Wait until a sample is at least `value`."""
        async with asyncio.timeout(20):
            while (await self.metrics()).get(name, 0.0) < value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def attainment(self) -> dict[str, Any]:
        return (await self.http.get(self.admin_url + "/v1/attainment")).json()

    async def at_rest(self) -> None:
        """Wait until nothing is in flight anywhere in the proxy, and check that nothing is held."""
        await until(lambda: not self.proxy.lifecycle.in_flight, "requests in flight")
        assert self.proxy.dispatcher.num_waiting == 0
        assert set(self.proxy.pods.outstanding().values()) <= {0}


@asynccontextmanager
async def running_proxy(
    directory: Path,
    endpoints: Sequence[Endpoint] = (),
    *,
    live: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    keys: Path | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A proxy that knows these endpoints. `config` and `settings` override single fields."""
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (directory / "live.json").write_text(json.dumps(live or LIVE))
    (directory / "endpoints.json").write_text(_endpoints(endpoints))
    base = proxy_settings(read_pod_config(directory / "config.json"))
    document = LiveDocument(directory, live_settings)
    proxy = Proxy(replace(base, **settings), document, KeyFile(keys) if keys else None)
    sockets = [socket.create_server((HOST, 0)) for _ in range(2)]
    urls = ["http://{}:{}".format(*s.getsockname()[:2]) for s in sockets]
    discovery = FileDiscovery(
        directory / "endpoints.json", refused=lambda: proxy.metrics.router.document_refused("endpoints")
    )
    task = asyncio.create_task(proxy.run(discovery, *sockets))
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        try:
            await until(lambda: proxy.lifecycle.ready or task.done(), "the proxy is ready")
            yield Running(proxy, *urls, directory, http, task)
        finally:
            proxy.lifecycle.stop()
            proxy.lifecycle.stop()
            await task


@dataclass
class Pair:
    """A proxy in front of fake pods, all of them known to it."""

    running: Running
    prefill: list[FakePrefill]
    decode: list[FakeDecode]


@asynccontextmanager
async def proxy_with_pods(
    directory: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    state: bool = True,
    **options: Any,
) -> AsyncIterator[Pair]:
    """A proxy and fake pods. With `state`, prefill pods report an idle state once."""
    prefill = [FakePrefill(name=f"p{i}") for i in range(num_prefill)]
    decode = [FakeDecode(name=f"d{i}", sources=prefill) for i in range(num_decode)]
    async with AsyncExitStack() as stack:
        for pod in (*prefill, *decode):
            pod.address = await stack.enter_async_context(serving(pod.app()))
        for pod in prefill:
            if state:
                pod.report()
        endpoints = [pod.endpoint() for pod in (*prefill, *decode)]
        running = await stack.enter_async_context(running_proxy(directory, endpoints, **options))
        await until(lambda: len(running.proxy.pods.candidates()) == num_prefill)
        if state:
            await until(lambda: all(pod.state for pod in running.proxy.pods.candidates()))
        yield Pair(running, prefill, decode)


@asynccontextmanager
async def proxy_with_colocated(
    directory: Path, **options: Any
) -> AsyncIterator[tuple[Running, FakeColocated]]:
    pod = FakeColocated(name="c0")
    async with serving(pod.app()) as address:
        pod.address = address
        pod.report()
        config = {"mode": "Colocated"}
        async with running_proxy(directory, [pod.endpoint()], config=config, **options) as running:
            await until(lambda: any(p.state for p in running.proxy.pods.candidates()))
            yield running, pod


def _endpoints(endpoints: Sequence[Endpoint]) -> str:
    return EndpointsFile(endpoints=tuple(endpoints)).model_dump_json()


__all__ = ["FakePod", "Pair", "Running", "proxy_with_colocated", "proxy_with_pods", "running_proxy", "write"]
