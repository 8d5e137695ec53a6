"""How fast this machine prefills while decode is busy, measured through the service itself.

The service's own start-up profile is taken before any load. A benchmark on one machine shares its cores between
prefill and decode pods, so lengths and rates follow from a profile taken with decode busy: background requests
generate without a pause while probes of growing length are prefilled one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import httpx

from flowprefill.bench.load import CHAT, DOCUMENT, LoadItem, Shape, Tokens, cut
from flowprefill.bench.replay import REQUEST_TIMEOUT_S, replay, send
from flowprefill.bench.report import RequestRecord
from flowprefill.errors import FlowPrefillError
from flowprefill.scheduling.predictor import Predictor, fit
from flowprefill.scheduling.profile import Profile, ProfileSample, Provenance

SHORTEST_PROBE = 48
LONGEST_PROBE = 4096
ENOUGH_S = 1.4
"""A probe that took this long ends the doubling: the longest document takes little more."""
BUSY_STREAMS = 2
BUSY_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTasks:
    """Completed prefill tasks and answered preemptions of a pod, as `GET /v1/history` tells them."""

    tasks: tuple[dict[str, object], ...]
    preemptions: tuple[dict[str, object], ...]

    @property
    def task_ids(self) -> set[object]:
        return {entry["task_id"] for entry in (*self.tasks, *self.preemptions)}

    def since(self, before: FinishedTasks) -> FinishedTasks:
        """Only what an earlier reading did not know."""
        known = before.task_ids
        return FinishedTasks(
            tasks=tuple(entry for entry in self.tasks if entry["task_id"] not in known),
            preemptions=tuple(entry for entry in self.preemptions if entry["task_id"] not in known),
        )


async def read_history(admin_url: str) -> FinishedTasks:
    """What the prefill pod remembers of its last tasks and preemptions."""
    async with httpx.AsyncClient(base_url=admin_url, timeout=10.0) as client:
        response = await client.get("/v1/history")
        response.raise_for_status()
        body = response.json()
    return FinishedTasks(tasks=tuple(body["tasks"]), preemptions=tuple(body["preemptions"]))


_PROBES = itertools.count(1)  # over all probers: what one has sent is cached for the next


class Prober:
    """Sends single requests of chosen lengths, each with text of its own so that no prefix is found cached."""

    def __init__(self, client: httpx.AsyncClient, model: str, tokens: Tokens) -> None:
        self._client, self._model, self._tokens = client, model, tokens

    async def send(self, num_tokens: int, *, max_tokens: int, slo_class: str) -> RequestRecord:
        """Send one prompt with about `num_tokens` tokens of text. Raises FlowPrefillError when it is not answered."""
        number = next(_PROBES)
        name = f"({number})"
        text = cut(self._tokens, 37 * number, max(num_tokens - len(self._tokens.encode(name)), 1))
        item = LoadItem(
            at_s=0.0,
            slo_class=slo_class,
            prompt=f"{name} {text}",
            target_tokens=num_tokens,
            shared_tokens=0,
            max_tokens=max_tokens,
        )
        record = await send(
            self._client, self._model, item, slo_s=60.0, started_s=0.0, request_id=f"probe-{number}"
        )
        if record.ttft_s is None:
            raise FlowPrefillError(f"a probe of {num_tokens} tokens failed: {record.error}")
        return record


@contextlib.asynccontextmanager
async def prober(url: str, model: str, tokens: Tokens) -> AsyncIterator[Prober]:
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        yield Prober(client, model, tokens)


async def profile_with_decode_busy(
    url: str,
    admin_url: str,
    model: str,
    tokens: Tokens,
    *,
    max_model_len: int,
    on_probe: Callable[[int], None] = lambda num_tokens: None,
) -> Predictor:
    """A predictor fitted to prefills of this service while its decode pod generates without a pause."""
    before = await read_history(admin_url)
    async with prober(url, model, tokens) as probes:

        async def keep_busy() -> None:
            while True:
                await probes.send(SHORTEST_PROBE, max_tokens=BUSY_TOKENS, slo_class=CHAT)

        busy = [asyncio.create_task(keep_busy()) for _ in range(BUSY_STREAMS)]
        try:
            num_tokens = 2 * SHORTEST_PROBE
            while num_tokens <= min(LONGEST_PROBE, max_model_len - BUSY_TOKENS):
                for _ in range(2 if num_tokens < 512 else 1):
                    on_probe(num_tokens)
                    await probes.send(num_tokens, max_tokens=1, slo_class=DOCUMENT)
                longest_s = max(sample.seconds for sample in await _samples(admin_url, before))
                if longest_s > ENOUGH_S:
                    break
                num_tokens = num_tokens * 3 // 2
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
    provenance = Provenance(
        model=model,
        engine="service",
        device="this machine",
        dtype="as served",
        taken_on=datetime.now(UTC).date(),
    )
    return fit(Profile(provenance=provenance, samples=tuple(await _samples(admin_url, before))))


async def _samples(admin_url: str, before: FinishedTasks) -> list[ProfileSample]:
    """Tasks of one request each that ran without a pause, as profile samples."""
    samples = []
    for entry in (await read_history(admin_url)).since(before).tasks:
        items = entry["items"]
        assert isinstance(items, list)
        if len(items) != 1 or entry["preemptions"]:
            continue
        _, num_new, num_cached = items[0]
        samples.append(
            ProfileSample(num_new=num_new, num_cached=num_cached, seconds=float(str(entry["executed_s"])))
        )
    if not samples:
        raise FlowPrefillError("the prefill pod reports no finished task; is its admin port the right one?")
    return samples


async def template_tokens(url: str, model: str, tokens: Tokens) -> int:
    """Tokens that the chat template adds to a message."""
    async with prober(url, model, tokens) as probes:
        return (await probes.send(64, max_tokens=1, slo_class=CHAT)).num_prompt_tokens - 64


async def isolated_ttft_s(
    url: str, model: str, tokens: Tokens, shape: Shape, *, overhead_tokens: int, repeats: int = 3
) -> dict[str, float]:
    """Median TTFT of a class's mean prompt on an idle service, per class."""
    async with prober(url, model, tokens) as probes:
        found = {}
        for slo_class, length in ((CHAT, shape.short_mean), (DOCUMENT, shape.document_mean)):
            records = [
                await probes.send(length - overhead_tokens, max_tokens=2, slo_class=slo_class)
                for _ in range(repeats)
            ]
            found[slo_class] = statistics.median(
                record.ttft_s for record in records if record.ttft_s is not None
            )
        return found


async def capacity_per_s(
    url: str, model: str, items: Sequence[LoadItem], predictor: Predictor, mean_service_s: float
) -> float:
    """Requests per second that the service prefills when it always has some waiting.

    `items` are sent at once. Their number is small and their mix chance, so the measured pace is applied to the
    predicted work of the load at large: predicted seconds of `items` over the seconds they took, over
    `mean_service_s`. Raises FlowPrefillError when one of them is not answered.
    """
    burst = [replace(item, at_s=0.0) for item in items]
    targets = {item.slo_class: REQUEST_TIMEOUT_S for item in burst}
    records = await replay(url, model, salted(tuple(burst), "(C)"), ttft_slo_s=targets, run="capacity")
    firsts = [record.at_s + record.ttft_s for record in records if record.ttft_s is not None]
    if len(firsts) < len(burst):
        failures = [record.error for record in records if record.error]
        raise FlowPrefillError(f"{len(burst) - len(firsts)} of {len(burst)} requests failed: {failures[0]}")
    work_s = sum(
        predictor.predict_s(item.target_tokens - item.shared_tokens, item.shared_tokens) for item in burst
    )
    return work_s / max(firsts) / mean_service_s


def salted(items: tuple[LoadItem, ...], salt: str) -> tuple[LoadItem, ...]:
    """The same load with `salt` before each prompt: equal lengths, but nothing cached by an earlier replay."""
    return tuple(replace(item, prompt=f"{salt} {item.prompt}") for item in items)
