"""A prompt through proxy, prefill leg and decode leg."""

from __future__ import annotations

from support.proxy_under_test import proxy_with_colocated, proxy_with_pods


async def test_a_completion_goes_through_both_legs(tmp_path):
    async with proxy_with_pods(tmp_path) as pair:
        answer = await pair.running.complete("one two three four")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "one two three "
        assert answer.json()["usage"]["prompt_tokens"] == 4
        assert pair.decode[0].pulled == 4
        await pair.running.at_rest()
        samples = await pair.running.metrics()
        assert samples["flowprefill_ttft_slo_requests_total{result=met,slo_class=chat}"] == 1
        assert samples["flowprefill_request_ttft_seconds_count{slo_class=chat,streaming=false}"] == 1


async def test_a_colocated_pod_gets_the_whole_request(tmp_path):
    async with proxy_with_colocated(tmp_path) as (running, pod):
        answer = await running.complete("one two three four")
        assert answer.json()["choices"][0]["text"] == "one two three "
        assert 0 < pod.seen[0].body["vllm_xargs"]["ttft_slo"] <= 1.0
        await running.at_rest()
