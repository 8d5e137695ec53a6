"""A proxy over time: pods come and go, documents change, streams are lost, the process stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from copy import deepcopy

import httpx

from flowprefill.wire import EndpointsFile, TaskState
from support.proxy_pods import HOST, FakeDecode, FakePrefill, serving, until
from support.proxy_under_test import CONFIG, LIVE, proxy_with_pods, running_proxy


async def test_a_pod_that_terminates_gets_nothing_new_and_finishes_what_it_has(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2) as pair:
        leaving, staying = pair.prefill
        leaving.gate.clear()
        first = asyncio.create_task(pair.running.complete())
        await until(lambda: leaving.seen)
        endpoints = [leaving.endpoint(terminating=True), staying.endpoint(), pair.decode[0].endpoint()]
        pair.running.write_endpoints(endpoints)
        await until(lambda: len(pair.running.proxy.pods.candidates()) == 1)
        for _ in range(3):
            await pair.running.complete()
        assert len(leaving.seen) == 1
        leaving.gate.set()
        assert (await first).status_code == 200
        await pair.running.at_rest()


async def test_series_of_a_removed_pod_disappear(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2) as pair:
        name = "flowprefill_proxy_outstanding_requests{pod=p1,role=prefill}"
        assert name in await pair.running.metrics()
        pair.running.write_endpoints([pair.prefill[0].endpoint(), pair.decode[0].endpoint()])
        await until(lambda: len(pair.running.proxy.pods.candidates()) == 1)
        samples = await pair.running.metrics()
        assert not [sample for sample in samples if "p1" in sample]
        await until(lambda: pair.prefill[1].state_clients == 0)


async def test_bad_endpoints_keep_the_last_good_ones(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        refused = "flowprefill_documents_refused_total{document=endpoints}"
        twice = [pair.prefill[0].endpoint(), pair.prefill[0].endpoint()]
        for count, bad in enumerate(["{", '{"endpoints": 3}', twice], start=1):
            pair.running.write_endpoints(bad)
            await pair.running.until_sample(refused, count)
            assert (await pair.running.complete()).status_code == 200
        (tmp_path / "endpoints.json").unlink()
        assert (await pair.running.complete()).status_code == 200


async def test_legs_never_mix_revisions_and_our_own_is_used_once_it_is_complete(tmp_path):
    old_p, old_d = FakePrefill(name="p-old"), FakeDecode(name="d-old")
    new_p, new_d = FakePrefill(name="p-new", revision="r2"), FakeDecode(name="d-new", revision="r2")
    old_d.sources, new_d.sources = [old_p], [new_p]
    apps = [pod.app() for pod in (old_p, old_d, new_p, new_d)]
    async with serving(apps[0]) as a, serving(apps[1]) as b, serving(apps[2]) as c, serving(apps[3]) as d:
        old_p.address, old_d.address, new_p.address, new_d.address = a, b, c, d
        old_p.report()
        new_p.report()
        old = [old_p.endpoint(created_s=1.0), old_d.endpoint(created_s=1.0)]
        half = [new_p.endpoint(created_s=2.0), new_d.endpoint(created_s=2.0, ready=False)]
        whole = [half[0], new_d.endpoint(created_s=2.0)]
        async with running_proxy(tmp_path, [*old, *half], config={"revision": "r2"}) as running:
            names = lambda: [r.name for r in running.proxy.pods.revisions]  # noqa: E731
            await until(lambda: names() == ["r1"])
            assert (await running.complete()).status_code == 200
            running.write_endpoints([*old, *whole])
            await until(lambda: names() == ["r2", "r1"])
            await until(lambda: all(pod.state for pod in running.proxy.pods.candidates()))
            assert (await running.complete()).status_code == 200
            assert (len(old_p.seen), len(new_p.seen)) == (1, 1)
            running.write_endpoints(whole)
            await until(lambda: names() == ["r2"])
            assert (await running.complete()).status_code == 200
            assert (len(old_d.seen), len(new_d.seen)) == (1, 2)


async def test_a_request_that_came_before_any_pod_is_served_when_one_appears(tmp_path):
    async with proxy_with_pods(tmp_path, pod_wait_s=20.0) as pair:
        endpoints = [pair.prefill[0].endpoint(), pair.decode[0].endpoint()]
        pair.running.write_endpoints([])
        await until(lambda: not pair.running.proxy.pods.candidates())
        request = asyncio.create_task(pair.running.complete())
        await until(lambda: pair.running.proxy.dispatcher.num_waiting == 1)
        pair.running.write_endpoints(endpoints)
        assert (await request).status_code == 200


async def test_requests_are_bound_late_and_in_policy_order(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pod, running = pair.prefill[0], pair.running
        pod.report(running=TaskState(num_tokens=9000, remaining_s=60.0, deadline_in_s=0.01, feasible=False))
        held = running.proxy.pods.candidates()[0]
        await until(lambda: held.state.running)
        window = "word " * 2500  # more than a batch budget: not sent ahead of time
        tasks = []
        for class_ in ("batch", "chat"):
            headers = {"x-flowprefill-slo-class": class_}
            pod.report(
                running=TaskState(num_tokens=9000, remaining_s=60.0, deadline_in_s=0.01, feasible=True),
                suspended=[TaskState(num_tokens=1, remaining_s=1, deadline_in_s=1, feasible=True)] * 8,
            )
            await until(lambda: held.state.suspended)
            tasks.append(asyncio.create_task(running.complete(window, headers=headers, max_tokens=1)))
            count = len(tasks)
            await until(lambda count=count: running.proxy.dispatcher.num_waiting == count)
        assert not pod.seen
        pod.gate.clear()
        pod.report()
        await until(lambda: pod.seen)
        assert pod.seen[0].body["vllm_xargs"]["slo_class"] == "chat"  # it came last and goes first
        pod.gate.set()
        await asyncio.gather(*tasks)
        assert len(pod.seen) == 2
        await running.at_rest()


async def test_a_lost_state_stream_falls_back_and_comes_back(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        pod, known = pair.prefill[0], pair.running.proxy.pods.candidates()[0]
        state, pod.state = pod.state, None
        pod._state_changed.set()
        await until(lambda: known.state is None)
        assert (await pair.running.complete()).status_code == 200
        samples = await pair.running.metrics()
        assert samples["flowprefill_proxy_dispatches_total{kind=stateless}"] == 1
        pod.state = state
        pair.running.proxy.pods.suspect("nobody")  # unknown names do no harm
        assert (await pair.running.complete()).status_code == 200


async def test_stock_pods_without_a_state_stream_are_served_by_outstanding_work(tmp_path):
    async with proxy_with_pods(tmp_path, num_prefill=2, num_decode=2, state=False) as pair:
        for pod in pair.prefill:
            pod.gate.clear()
        tasks = [asyncio.create_task(pair.running.complete()) for _ in range(4)]
        await until(lambda: sum(len(pod.seen) for pod in pair.prefill) == 4)
        assert [len(pod.seen) for pod in pair.prefill] == [2, 2]
        for pod in pair.prefill:
            pod.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert [len(pod.seen) for pod in pair.decode] == [2, 2]
        await pair.running.at_rest()


async def test_a_held_prefix_attracts_the_request(tmp_path):
    from flowprefill.scheduling.kv import prefix_hashes

    async with proxy_with_pods(tmp_path, num_prefill=2) as pair:
        ids = list(range(200))
        pair.prefill[1].report(cached_prefixes=prefix_hashes(ids, 16), prediction=(0.0, 0.001, 0.0, 0.0))
        pair.prefill[0].report(prediction=(0.0, 0.001, 0.0, 0.0))
        await until(lambda: any(pod.cached for pod in pair.running.proxy.pods.candidates()))
        await pair.running.complete(ids)
        assert [len(pod.seen) for pod in pair.prefill] == [0, 1]


async def test_live_classes_change_without_a_restart_and_bad_ones_change_nothing(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        running = pair.running
        changed = deepcopy(LIVE)
        changed["generation"] = 2
        changed["policy"] = "fcfs"
        changed["sloClasses"] = [
            {**changed["sloClasses"][0], "ttftMilliseconds": 3210},
            {**changed["sloClasses"][1], "name": "bulk"},
        ]
        running.write_live(changed)
        await until(lambda: running.proxy.live.current.generation == 2)
        await running.complete(headers={"x-flowprefill-slo-class": "bulk"})
        assert pair.prefill[0].seen[0].body["vllm_xargs"]["slo_class"] == "bulk"
        samples = await running.metrics()
        assert samples["flowprefill_slo_ttft_seconds{slo_class=chat}"] == 3.21
        assert "flowprefill_slo_ttft_seconds{slo_class=strict}" not in samples
        assert "flowprefill_proxy_queue_requests{slo_class=strict}" not in samples
        edge = "flowprefill_request_ttft_seconds_bucket{le=3.21,slo_class=bulk,streaming=false}"
        assert samples[edge] == 1
        assert samples["flowprefill_live_generation{}"] == 2
        assert running.proxy.dispatcher.live.policy == "fcfs"

        running.write_live("{")
        await running.until_sample("flowprefill_documents_refused_total{document=live}", 1)
        assert running.proxy.live.current.generation == 2
        assert (await running.complete()).status_code == 200


async def test_a_live_document_that_arrives_by_a_moved_symlink_is_seen(tmp_path):
    """As kubelet updates a mounted ConfigMap: `live.json -> ..data/live.json`, and `..data` is moved."""
    async with proxy_with_pods(tmp_path) as pair:
        for number in (2, 3):
            version = tmp_path / f"..{number}"
            version.mkdir()
            (version / "live.json").write_text(json.dumps({**LIVE, "generation": number}))
            staged = tmp_path / "..data_tmp"
            staged.symlink_to(version.name)
            os.replace(staged, tmp_path / "..data")
            if number == 2:
                (tmp_path / "live.json").unlink()
                (tmp_path / "live.json").symlink_to("..data/live.json")
            await until(lambda number=number: pair.running.proxy.live.current.generation == number)


async def test_attainment_and_probes_are_on_the_admin_port(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        await pair.running.complete()
        await pair.running.at_rest()
        report = await pair.running.attainment()
        assert report["generation"] == 1
        assert list(report["classes"]) == ["chat", "batch", "strict"]
        assert report["classes"]["chat"]["met"] == 1
        assert report["classes"]["chat"]["windows"]["5m"] == {"met": 1, "missed": 0}
        in_use = (await pair.running.http.get(pair.running.admin_url + "/v1/config")).json()
        assert in_use == {"role": "proxy", "revision": "r1", "generation": 1}
        for path in ("/health", "/ready", "/metrics"):
            assert (await pair.running.http.get(pair.running.admin_url + path)).status_code == 200
        assert (await pair.running.http.get(pair.running.admin_url + "/v1/completions")).status_code == 404


async def test_a_stopping_proxy_answers_with_connection_close_and_lets_streams_end(tmp_path):
    async with proxy_with_pods(tmp_path, lame_duck_s=1.0, drain_s=30.0) as pair:
        running = pair.running
        pair.decode[0].free_tokens = 1
        pair.decode[0].token_gate.clear()
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, "stream": True}
        async with running.http.stream("POST", running.url + "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            running.proxy.lifecycle.stop()
            await until(lambda: running.proxy.lifecycle.phase == "lame_duck")
            assert (await running.http.get(running.admin_url + "/ready")).status_code == 503
            assert (await running.http.get(running.admin_url + "/health")).status_code == 200
            late = await running.http.get(running.url + "/v1/models")
            assert late.status_code == 200
            assert late.headers["connection"] == "close"
            await until(lambda: running.proxy.lifecycle.phase == "draining")
            pair.decode[0].token_gate.set()
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
        await running.task


async def test_a_second_signal_ends_what_is_in_flight_with_an_error_that_counts_as_missed(tmp_path):
    async with proxy_with_pods(tmp_path, lame_duck_s=60.0, drain_s=60.0) as pair:
        proxy = pair.running.proxy
        pair.prefill[0].gate.clear()
        unary = asyncio.create_task(pair.running.complete())
        await until(lambda: pair.prefill[0].seen)
        pair.prefill[0].report(draining=True)
        await until(lambda: proxy.pods.candidates()[0].state.draining)
        waiting = asyncio.create_task(pair.running.complete())
        await until(lambda: proxy.dispatcher.num_waiting == 1)
        proxy.lifecycle.stop()
        proxy.lifecycle.stop()
        await pair.running.task
        assert [answer.status_code for answer in await asyncio.gather(unary, waiting)] == [503, 503]
        await until(lambda: pair.prefill[0].seen[0].cancelled)
        assert proxy.attainment.report(["chat"], proxy.clock.now_s())["chat"]["missed"] == 2


async def test_a_proxy_process_serves_and_exits_with_0_on_sigterm(tmp_path):
    prefill, decode = FakePrefill(name="p0"), FakeDecode(name="d0")
    decode.sources = [prefill]
    prefill.report()
    async with serving(prefill.app()) as prefill.address, serving(decode.app()) as decode.address:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "live.json").write_text(json.dumps(LIVE))
        file = EndpointsFile(endpoints=(prefill.endpoint(), decode.endpoint()))
        (tmp_path / "endpoints.json").write_text(file.model_dump_json())
        port, admin_port = (_free_port() for _ in range(2))
        program = (
            "import sys; from pathlib import Path; from flowprefill.proxy.main import run;"
            "config, live, endpoints, host, port, admin = sys.argv[1:];"
            "sys.exit(run(Path(config), Path(live), Path(endpoints), host, int(port), int(admin)))"
        )
        arguments = [tmp_path / "config.json", tmp_path, tmp_path / "endpoints.json", HOST, port, admin_port]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *map(str, arguments))
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
                url = f"http://{HOST}:{port}"
                while not await _ready(http, f"http://{HOST}:{admin_port}/ready"):
                    assert process.returncode is None
                body = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
                answer = await http.post(url + "/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == "a b "
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _ready(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.HTTPError:
        await asyncio.sleep(0.05)
        return False


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return listening.getsockname()[1]
