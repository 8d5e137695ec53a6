"""A pod's parent process and its child, which is a stand-in for `vllm serve`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.server.vllm.channel import Seen, Started
from support.pods import live_config, pod_config, until, until_async
from support.vllm_core import SPEC, profile, snapshot
from support.vllm_pods import fake_pod, runs

STARTED = Started(spec=SPEC, profile=profile())


async def test_the_admin_port_answers_while_vllm_loads_and_the_pod_is_ready_once_its_core_has_told_of_itself(
    tmp_path: Path,
) -> None:
    async with fake_pod(tmp_path) as fake:
        fake.switch("loading")
        await fake.until_child_runs()
        health, ready = await fake.admin.get("/health"), await fake.admin.get("/ready")
        assert (health.status_code, health.json()["phase"]) == (200, "starting")
        assert ready.status_code == 503
        assert (await fake.state())["ready"] is False
        (fake.switches / "loading").unlink()
        await until_async(lambda: _serves(fake.pod.api_port), what="the child serves")
        assert not fake.pod.ready.is_set(), "the API is there, but the engine core has said nothing"
        fake.tell(STARTED)
        await fake.until_ready()
        assert (await fake.admin.get("/ready")).status_code == 200
        state = await fake.state()
        assert (state["ready"], state["kv_blocks"], state["block_size"]) == (True, 512, 16)


async def test_a_decode_pod_is_ready_when_its_api_is(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "decode") as fake:
        await fake.until_ready()
        argv = fake.started["argv"]
        assert not [word for word in argv if "flowprefill" in word]
        assert [word for word in argv if word.startswith("--kv-transfer-config") and "kv_consumer" in word]
        assert (await fake.state())["role"] == "decode"


async def test_a_stop_waits_for_requests_and_then_ends_every_process(tmp_path: Path) -> None:
    async with fake_pod(tmp_path) as fake:
        fake.tell(STARTED)
        await fake.until_ready()
        fake.switch("in_flight", "2")
        fake.pod.stop()
        await until_async(lambda: _phase(fake.admin, "draining"), what="draining")
        assert (await fake.state())["draining"] is True
        assert fake.survivors()
        fake.switch("in_flight", "0")
        assert await asyncio.wait_for(fake.running, 30) == 0
        assert (fake.switches / "stopped").exists(), "vLLM ended by itself"
        assert fake.survivors() == []


async def test_a_drain_ends_with_its_time(tmp_path: Path) -> None:
    termination = {"preStopSeconds": 0, "lameDuckSeconds": 0, "drainSeconds": 1}
    async with fake_pod(tmp_path, termination=termination) as fake:
        fake.tell(STARTED)
        fake.switch("in_flight", "1")
        await fake.until_ready()
        fake.pod.stop()
        assert await asyncio.wait_for(fake.running, 30) == 0
        assert fake.survivors() == []


async def test_a_prefill_pod_waits_until_its_kv_is_pulled(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "prefill") as fake:
        fake.tell(STARTED, Seen(snapshot=snapshot(kv_blocks_free=500), cached_prefixes=()))
        await fake.until_ready()
        await until_async(lambda: _free(fake, 500), what="the state is heard")
        fake.pod.stop()
        await until_async(lambda: _phase(fake.admin, "draining"), what="draining")
        done, _ = await asyncio.wait({fake.running}, timeout=1.0)
        assert not done, "no request is in flight, but KV is held"
        fake.tell(Seen(snapshot=snapshot(), cached_prefixes=()))
        assert await asyncio.wait_for(fake.running, 30) == 0


async def test_a_second_stop_kills_what_does_not_end(tmp_path: Path) -> None:
    async with fake_pod(tmp_path) as fake:
        fake.tell(STARTED)
        fake.switch("in_flight", "1")
        fake.switch("stubborn")
        await fake.until_ready()
        fake.pod.stop()
        await until_async(lambda: _phase(fake.admin, "draining"), what="draining")
        fake.pod.stop()
        assert await asyncio.wait_for(fake.running, 5) == 0
        assert fake.survivors() == []


async def test_a_stop_while_vllm_loads_ends_it(tmp_path: Path) -> None:
    async with fake_pod(tmp_path) as fake:
        fake.switch("loading")
        await fake.until_child_runs()
        fake.pod.stop()
        assert await asyncio.wait_for(fake.running, 30) == 0
        assert fake.survivors() == []


@pytest.mark.parametrize("loading", [True, False])
async def test_a_child_that_dies_fails_the_pod_with_the_reason(tmp_path: Path, loading: bool) -> None:
    async with fake_pod(tmp_path) as fake:
        if loading:
            fake.switch("loading")
            await fake.until_child_runs()
        else:
            fake.tell(STARTED)
            await fake.until_ready()
        fake.switch("crash")
        await until_async(lambda: _status(fake.admin, 503), what="not live")
        reason = (await fake.admin.get("/health")).json()["reason"]
        assert "exit code 7" in reason
        assert (await fake.admin.get("/ready")).status_code == 503
        assert await asyncio.wait_for(fake.running, 30) == 1
        assert fake.survivors() == [], "an engine core that outlived its API server is ended too"


async def test_a_child_that_is_killed_names_the_signal(tmp_path: Path) -> None:
    async with fake_pod(tmp_path) as fake:
        fake.tell(STARTED)
        await fake.until_ready()
        os.kill(fake.started["pid"], signal.SIGKILL)
        await until_async(lambda: _status(fake.admin, 503), what="not live")
        assert "SIGKILL" in (await fake.admin.get("/health")).json()["reason"]


@pytest.mark.parametrize("careless", [False, True])
async def test_nothing_stays_when_the_pod_itself_is_killed(tmp_path: Path, careless: bool) -> None:
    switches = tmp_path / "switches"
    switches.mkdir()
    if careless:
        (switches / "careless").touch()
    config, live = tmp_path / "config.json", tmp_path / "live.json"
    config.write_text(pod_config(engine={"type": "vllm"}).to_json())
    live.write_text(live_config().to_json())
    code = (
        "import asyncio, sys; from pathlib import Path; "
        "from flowprefill.hosting.documents import LiveDocument, read_pod_config; "
        "from flowprefill.server.settings import checked; "
        "from flowprefill.server.vllm.pod import VllmPod; from support.vllm_pods import prepared; import support; "
        "pod = VllmPod('colocated', read_pod_config(Path(sys.argv[1])), LiveDocument(Path(sys.argv[2]), checked), "
        "host='127.0.0.1', port=0, admin_port=0, kv_port=0, device='cpu', "
        "program=(sys.executable, sys.argv[3]), prepare=prepared); "
        "sys.exit(asyncio.run(pod.run()))"
    )
    tests = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(config), str(live), str(tests / "support" / "fake_vllm.py")),
        env=os.environ | {"FAKE_VLLM": str(switches), "PYTHONPATH": str(tests)},
    )
    try:
        await until(lambda: (switches / "started.json").exists() or process.returncode is not None)
        started = json.loads((switches / "started.json").read_text())
        process.kill()
        await process.wait()
        await until(
            lambda: not any(runs(started[name]) for name in ("pid", "core", "keeper")), what="all gone"
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_flags_that_are_not_accepted_stop_the_pod_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"--pipeline-parallel-size.*use tensor parallelism"):
        async with fake_pod(tmp_path, args=("--pipeline-parallel-size", "2")):
            raise AssertionError("it started")


async def _serves(port: int) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        except httpx.TransportError:
            return False


async def _phase(admin: httpx.AsyncClient, phase: str) -> bool:
    return bool((await admin.get("/health")).json().get("phase") == phase)


async def _status(admin: httpx.AsyncClient, status: int) -> bool:
    return (await admin.get("/health")).status_code == status


async def _free(fake: object, blocks: int) -> bool:
    return bool((await fake.state())["kv_blocks_free"] == blocks)  # type: ignore[attr-defined]
