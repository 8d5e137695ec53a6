"""`GET /v1/config`: what a pod runs with, from before its model is loaded on."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest

from flowprefill.hosting.documents import LiveDocument
from flowprefill.server.loading import Loaded, assemble
from flowprefill.server.main import PodServer
from flowprefill.server.settings import checked
from flowprefill_crd import PodConfig
from support.pods import (
    WordTokenizer,
    live_config,
    pod_config,
    running_pod,
    simulated_engine,
    until_async,
)


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
async def test_a_pod_tells_its_role_revision_and_the_generation_in_use(tmp_path: Path, role: str) -> None:
    async with running_pod(role, tmp_path, live=live_config(generation=7)) as pod:
        assert (await pod.admin.get("/v1/config")).json() == {
            "role": role,
            "revision": "r1",
            "generation": 7,
        }
        pod.live_path.write_text("{")
        await pod.until_metric("flowprefill_live_document_errors_total", 1)
        assert (await pod.admin.get("/v1/config")).json()["generation"] == 7  # the last good one
        pod.live_path.write_text(live_config(generation=8).to_json())
        await until_async(lambda: _generation_is(pod.admin, 8), what="generation 8")


async def test_a_pod_that_still_loads_its_model_follows_the_live_document_and_says_so(tmp_path: Path) -> None:
    live_path = tmp_path / "live.json"
    live_path.write_text(live_config(generation=1).to_json())
    may_load = threading.Event()

    def load(config: PodConfig, role: str) -> Loaded:
        assert may_load.wait(60)
        return assemble(config, role, simulated_engine(), WordTokenizer(), began_s=time.monotonic())

    server = PodServer(
        "prefill",
        pod_config(),
        LiveDocument(live_path, checked),
        host="127.0.0.1",
        port=0,
        admin_port=0,
        kv_port=0,
        handle_signals=False,
        load=load,
    )
    running = asyncio.ensure_future(server.run())
    try:
        await until_async(lambda: _is_true(server.admin_port != 0), what="ports")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.admin_port}", timeout=60) as admin:
            await until_async(lambda: _generation_is(admin, 1), what="generation 1")
            changed = live_config(
                generation=2, sloClasses=[{**_chat(), "name": "renamed"}], policy="edf"
            ).to_json()
            live_path.write_text(changed)
            await until_async(lambda: _generation_is(admin, 2), what="generation 2")
            assert not server.ready.is_set()
            may_load.set()
            await server.ready.wait()
            assert await _generation_is(admin, 2)
            metrics = (await admin.get("/metrics")).text
            assert 'flowprefill_queue_requests{model_name="test-model",role="prefill",service="svc",slo_class="renamed"}' in metrics  # fmt: skip
    finally:
        may_load.set()
        server.stop()
        server.stop()
        await running


def _chat() -> dict[str, object]:
    return {
        "name": "chat",
        "ttftMilliseconds": 500,
        "minTtftMilliseconds": 50,
        "maxTtftMilliseconds": 5000,
        "default": True,
    }


async def _is_true(value: bool) -> bool:
    return value


async def _generation_is(admin: httpx.AsyncClient, generation: int) -> bool:
    try:
        return (await admin.get("/v1/config")).json()["generation"] == generation
    except httpx.TransportError:
        return False
