"""A pod as a process: ready when it can serve, gone when its work is done, exit code 0."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import httpx

from flowprefill_operator.node.ports import free_ports
from support.pod_process import START, pod_process
from support.pods import MODEL, live_config, pod_config, until_async

SLOW = {"type": "simulated", "args": ["--cost", "tiny", "--scale", "20"]}  # about 40 ms a decode step
STOPS = {"preStopSeconds": 0, "lameDuckSeconds": 1, "drainSeconds": 60}


async def test_a_running_stream_ends_well_after_sigterm_and_the_exit_code_is_0(tmp_path: Path) -> None:
    async with pod_process(tmp_path, "colocated", engine=SLOW, termination=STOPS, mode="Colocated") as pod:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "stream": True, "ignore_eos": True}
        async with pod.api.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            pod.process.send_signal(signal.SIGTERM)

            async def is_lame() -> bool:
                return not await pod.is_ready()

            await until_async(is_lame, what="not ready")
            # A lame duck still serves, on connections that it asks to close.
            async with httpx.AsyncClient(base_url=pod.api.base_url) as late:
                served = await late.post("/v1/completions", json=body | {"max_tokens": 1, "stream": False})
                assert served.status_code == 200
                assert served.headers["connection"] == "close"
            rest = [line async for line in lines if line]
        events = [json.loads(line[6:]) for line in [first, *rest[:-1]]]
        assert rest[-1] == "data: [DONE]"
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(pod.process.wait(), 60) == 0
        log = [json.loads(line) for line in pod.log.read_text().splitlines()]
        phases = [entry["phase"] for entry in log if entry["message"] == "pod phase"]
        assert phases == ["ready", "lame_duck", "draining", "stopped"]


async def test_a_prefill_pod_stays_until_its_kv_is_released(tmp_path: Path) -> None:
    stops = STOPS | {"lameDuckSeconds": 0}
    async with pod_process(tmp_path, "prefill", termination=stops) as pod:
        leg = {
            "model": MODEL,
            "prompt": "hello",
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        params = (await pod.api.post("/v1/completions", json=leg)).json()["kv_transfer_params"]
        pod.process.send_signal(signal.SIGTERM)

        async def is_draining() -> bool:
            return bool((await pod.admin.get("/ready")).json()["phase"] == "draining")

        await until_async(is_draining, what="draining")
        assert pod.process.returncode is None
        reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        body = json.dumps({"type": "ack", "request_id": params["remote_request_id"]}).encode()
        writer.write(b"FPKV\x01" + len(body).to_bytes(4, "big") + body)
        assert b'"known":true' in await reader.read(100)
        writer.close()
        assert await asyncio.wait_for(pod.process.wait(), 60) == 0


async def test_a_second_signal_hurries(tmp_path: Path) -> None:
    stops = {"preStopSeconds": 0, "lameDuckSeconds": 600, "drainSeconds": 600}
    async with pod_process(tmp_path, "colocated", engine=SLOW, termination=stops, mode="Colocated") as pod:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        async with pod.api.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            pod.process.send_signal(signal.SIGTERM)

            async def is_lame() -> bool:
                return not await pod.is_ready()

            await until_async(is_lame, what="not ready")
            pod.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(pod.process.wait(), 60) == 0


async def test_a_stop_while_the_model_loads_ends_the_process_at_once(tmp_path: Path) -> None:
    endless = "import time, flowprefill.server.main as m; m.PodServer.__init__.__kwdefaults__['load'] = (\n"
    endless += "    lambda config, role: time.sleep(3600)\n)\n"
    config, live = tmp_path / "config.json", tmp_path / "live.json"
    config.write_text(pod_config().to_json())
    live.write_text(live_config().to_json())
    admin_port = free_ports(1)[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", endless + START, "prefill", str(config), str(live)),
        *("0", str(admin_port), "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}") as admin:

        async def loading() -> bool:
            try:
                return (await admin.get("/health")).json() == {"status": "ok", "phase": "starting"}
            except httpx.ConnectError:
                return False

        await until_async(loading, what="loading")
    process.terminate()
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"stopped while the model was loading" in stderr


async def test_a_changed_live_document_is_followed_and_a_bad_one_is_not(tmp_path: Path) -> None:
    async with pod_process(tmp_path, "prefill") as pod:

        async def generation() -> int:
            async with pod.admin.stream("GET", "/v1/state") as lines:
                return int(json.loads(await anext(lines.aiter_lines()))["generation"])

        async def is_2() -> bool:
            return await generation() == 2

        assert await generation() == 1
        (pod.live / "live.json").write_text(live_config(generation=2, policy="fcfs").to_json())
        await until_async(is_2, what="generation 2")
        (pod.live / "live.json").write_text("{")

        async def is_counted() -> bool:
            found = await pod.metric("flowprefill_live_document_errors_total{")
            return found is not None and found.endswith(" 1.0")

        await until_async(is_counted, what="the bad document is counted")
        assert await generation() == 2
        leg = {
            "model": MODEL,
            "prompt": "hello",
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        assert (await pod.api.post("/v1/completions", json=leg)).status_code == 200


async def test_a_pod_that_cannot_start_says_why_and_exits(tmp_path: Path) -> None:
    config, live = tmp_path / "config.json", tmp_path / "live.json"
    config.write_text("{}")
    live.write_text(live_config().to_json())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START, "prefill", str(config), str(live), "0", "0", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode != 0
    assert b"InvalidConfiguration" in stderr
    assert b"config.json" in stderr


async def test_a_port_in_use_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    config, live = tmp_path / "config.json", tmp_path / "live.json"
    # This model's files do not exist: an attempt to load it would be the error instead.
    config.write_text(
        pod_config(model={"uri": "file:///nowhere", "servedName": "m"}, engine={"type": "torch"}).to_json()
    )
    live.write_text(live_config().to_json())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, "prefill", str(config), str(live), port, "0", "0"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}".encode() in stderr


async def test_requests_are_logged_as_json_without_secrets_when_the_live_document_says_so(
    tmp_path: Path,
) -> None:
    changes = {"perRequestLog": True}
    async with pod_process(tmp_path, "colocated", live_changes=changes, mode="Colocated") as pod:
        headers = {"x-request-id": "seen-1", "authorization": "Bearer hunter2"}
        body = {"model": MODEL, "prompt": "whispered words", "max_tokens": 2}
        await pod.api.post("/v1/completions", json=body, headers=headers)
        await pod.api.post("/v1/completions", content=b"[]", headers={"x-request-id": "seen-2"})
        pod.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(pod.process.wait(), 60)
        text = pod.log.read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    seen = {e["request_id"]: e["status"] for e in entries if e["message"] == "request"}
    assert seen == {"seen-1": 200, "seen-2": 400}
    assert "hunter2" not in text
    assert "whispered" not in text
