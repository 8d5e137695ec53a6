"""A public load generator, unmodified, through the proxy: its report and our counters tell the same story."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.load_generator import executable, write_tokenizer
from support.proxy_under_test import proxy_with_pods

REQUESTS = 40


@pytest.mark.timeout(900)
async def test_aiperf_streams_through_the_proxy_and_agrees_with_its_counters(tmp_path):
    aiperf = await asyncio.to_thread(executable)
    write_tokenizer(tmp_path / "tokenizer")
    async with proxy_with_pods(tmp_path, num_prefill=2, num_decode=2) as pair:
        command = [
            *(
                "profile",
                "--model",
                "tiny",
                "--url",
                pair.running.url,
                "--endpoint-type",
                "chat",
                "--streaming",
            ),
            *("--tokenizer", str(tmp_path / "tokenizer"), "--isl", "30", "--osl", "4"),
            *("--request-count", str(REQUESTS), "--request-rate", "20", "--arrival-pattern", "poisson"),
            *("--random-seed", "1", "--goodput", "time_to_first_token:20000"),
            *("--header", "x-flowprefill-slo-class:batch", "--use-server-token-count"),
            *("--ui", "none", "--artifact-dir", str(tmp_path / "report")),
        ]
        process = await asyncio.create_subprocess_exec(
            str(aiperf), *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode(errors="replace")[-3000:]
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        legs = sum(len(pod.seen) for pod in pair.decode)

    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["good_request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")
    assert legs == REQUESTS
    assert samples["flowprefill_requests_total{code=200,outcome=ok,slo_class=batch}"] == REQUESTS
    assert samples["flowprefill_ttft_slo_requests_total{result=met,slo_class=batch}"] == REQUESTS
    ours = samples["flowprefill_request_ttft_seconds_sum{slo_class=batch,streaming=true}"] / REQUESTS
    # The client's clock starts earlier and stops later than ours, never the other way round.
    assert ours <= report["time_to_first_token"]["avg"] / 1000
