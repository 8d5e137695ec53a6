"""Asks pods about themselves on their admin ports, beside the passes, so that no pass waits for a pod."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from flowprefill_operator.controller.queue import Key
from flowprefill_operator.status.compute import ATTAINMENT_WINDOW
from flowprefill_operator.status.view import Reports

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 3.0
ROUND_TRIP_TIMEOUT_S = 40.0
ATTAINMENT_EVERY_S = 60.0
AT_ONCE = 32
MAX_ANSWER_BYTES = 1 << 20
RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between trials of a round trip; the last is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to find out. Addresses are `host:port` of admin ports by pod name; `generation` is the live document that
    pods should follow, `prove` a revision to serve a token with, by `provers`, which are of that revision."""

    proxies: Mapping[str, str]
    pods: Mapping[str, str]
    generation: int | None
    prove: str | None
    provers: Mapping[str, str]


@dataclass(slots=True)
class _Known:
    proven: set[str] = field(default_factory=set)
    tried: str | None = None
    unproven: str | None = None
    trials: int = 0
    try_at_s: float = 0.0
    generations: dict[str, int] = field(default_factory=dict)
    attainment: dict[str, tuple[int, int]] | None = None
    attainment_at_s: float = -ATTAINMENT_EVERY_S
    task: asyncio.Task[None] | None = None
    asked: bool = False


class Prober:
    """What pods of each service have said, refreshed on demand. Event-loop thread only."""

    def __init__(self, http: aiohttp.ClientSession, changed: Callable[[Key], None]) -> None:
        """`changed` is called with a service about which something new is known."""
        self._http = http
        self._changed = changed
        self._known: dict[Key, _Known] = {}
        self._places = asyncio.Semaphore(AT_ONCE)

    def reports(self, key: Key) -> Reports:
        known = self._known.get(key, _Known())
        return Reports(
            proven=frozenset(known.proven),
            unproven=known.unproven,
            generations=dict(known.generations),
            attainment=None if known.attainment is None else dict(known.attainment),
        )

    def remember_proven(self, key: Key, revision: str) -> None:
        """An earlier operator has seen this revision serve."""
        self._known.setdefault(key, _Known()).proven.add(revision)

    def is_new(self, key: Key) -> bool:
        """Whether pods of the service are being asked for the first time."""
        known = self._known.get(key)
        return known is not None and known.task is not None and not known.asked

    def forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        if known is not None and known.task is not None:
            known.task.cancel()

    async def close(self) -> None:
        tasks = [known.task for known in self._known.values() if known.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ask(self, key: Key, ask: Ask) -> float | None:
        """Find out what is due, unless that is under way. After how many seconds to ask again; None for no hurry."""
        known = self._known.setdefault(key, _Known())
        for gone in [name for name in known.generations if name not in ask.pods]:
            del known.generations[gone]
        if ask.prove is not None and ask.prove != known.tried:
            known.tried, known.unproven, known.trials, known.try_at_s = ask.prove, None, 0, 0.0
        now_s = asyncio.get_running_loop().time()
        behind = {name: at for name, at in ask.pods.items() if known.generations.get(name) != ask.generation}
        prove = ask.prove if ask.prove not in known.proven and ask.provers else None
        due = (prove is not None and known.try_at_s <= now_s) or bool(behind and ask.generation is not None)
        attainment = bool(ask.proxies) and known.attainment_at_s + ATTAINMENT_EVERY_S <= now_s
        if not ask.proxies:
            known.attainment = None
        if (due or attainment) and (known.task is None or known.task.done()):
            known.task = asyncio.create_task(
                self._find_out(
                    key, known, ask, behind, prove if known.try_at_s <= now_s else None, attainment
                ),
                name=f"ask pods of {'/'.join(key)}",
            )
        waits = []
        if prove is not None:
            waits.append(max(known.try_at_s - now_s, 1.0))
        if behind:
            waits.append(2.0)
        if ask.proxies:
            waits.append(max(known.attainment_at_s + ATTAINMENT_EVERY_S - now_s, 1.0))
        return min(waits, default=None)

    async def _find_out(
        self,
        key: Key,
        known: _Known,
        ask: Ask,
        behind: Mapping[str, str],
        prove: str | None,
        attainment: bool,
    ) -> None:
        before = self.reports(key)
        await asyncio.gather(
            self._generations(known, behind),
            self._attainment(known, ask.proxies) if attainment else _nothing(),
            self._prove(known, prove, ask.provers) if prove is not None else _nothing(),
        )
        first, known.asked = not known.asked, True
        if first or self.reports(key) != before:
            self._changed(key)

    async def _generations(self, known: _Known, behind: Mapping[str, str]) -> None:
        answers = await asyncio.gather(*(self._json("GET", at, "/v1/config") for at in behind.values()))
        for name, answer in zip(behind, answers, strict=True):
            generation = answer.get("generation")
            if isinstance(generation, int):
                known.generations[name] = generation

    async def _attainment(self, known: _Known, proxies: Mapping[str, str]) -> None:
        known.attainment_at_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(self._json("GET", at, "/v1/attainment") for at in proxies.values()))
        told = [found for answer in answers if (found := _counts(answer)) is not None]
        total: dict[str, tuple[int, int]] = {}
        for name, met, missed in (entry for found in told for entry in found):
            before = total.get(name, (0, 0))
            total[name] = (before[0] + met, before[1] + missed)
        known.attainment = total if told else None

    async def _prove(self, known: _Known, revision: str, provers: Mapping[str, str]) -> None:
        names = sorted(provers)
        at = provers[names[known.trials % len(names)]]
        answer = await self._json(
            "POST", at, "/v1/round-trip", body={"revision": revision}, timeout_s=ROUND_TRIP_TIMEOUT_S
        )
        if answer.get("ok") is True:
            known.proven.add(revision)
            known.unproven, known.trials, known.try_at_s = None, 0, 0.0
            return
        known.unproven = str(answer.get("reason") or answer.get("failed") or "the proxy gave no reason")[:500]
        pause_s = RETRY_S[min(known.trials, len(RETRY_S) - 1)]
        known.trials += 1
        known.try_at_s = asyncio.get_running_loop().time() + pause_s

    async def _json(
        self,
        method: str,
        at: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> dict[str, Any]:
        """The answer as JSON; `{"failed": reason}` when there is none."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=ANSWER_TIMEOUT_S)
        try:
            async with (
                self._places,
                self._http.request(
                    method, f"http://{at}{path}", json=body, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                found = await _body(response)
                return found if isinstance(found, dict) else {"failed": f"HTTP {response.status} from {at}"}
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return {"failed": f"{at}{path}: {error or type(error).__name__}"}


def _counts(answer: Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Name, met and missed of each class in a proxy's answer; None when it is no such answer."""
    try:
        windows = {name: report["windows"][ATTAINMENT_WINDOW] for name, report in answer["classes"].items()}
        return [(str(name), int(found["met"]), int(found["missed"])) for name, found in windows.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


async def _body(response: aiohttp.ClientResponse) -> object:
    """The answer's JSON; None when it is none, or longer than anything a pod has to say."""
    text = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        text += chunk
        if len(text) > MAX_ANSWER_BYTES:
            return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


async def _nothing() -> None:
    return None
