"""A steady load on a service, until it is told to stop: what failed while something in the cluster changed?

Open loop: requests come at random intervals whatever becomes of them. No request is repeated. In turn a request takes a new
connection or one that is kept alive, and is answered as a stream or at once. Beside them, at every moment, two long
streams and one long prefill are under way. A request has failed unless its answer is 2xx, complete, and has exactly
the tokens that were asked for.

Run it where the service can be reached: `python -m support.steady_load URL MODEL OUT --rate 2`; SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

SEED = 5
REQUEST_TIMEOUT_S = 120.0
STOP_S = 150.0
"""Most time that requests under way get once the load is told to stop."""

SHORT_PROMPT = "Tell me in a few words what a {} is."
WORDS = ("river", "bridge", "lantern", "compass", "harbour", "meadow", "glacier", "violin")
SHORT_TOKENS = 4
FEWEST_TOKENS, MOST_TOKENS = 16, 1500
LONG_PROMPT_WORDS = 1400


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. Times in seconds since the load began; `failure` is None when all was well."""

    kind: str
    connection: str
    began_s: float
    ended_s: float
    failure: str | None


class SteadyLoad:
    """The load and what became of it."""

    def __init__(
        self, url: str, model: str, *, rate: float, stream_tokens: int, stream_s: float | None = None
    ) -> None:
        """`rate` is short requests a second. Each long stream has `stream_tokens`; with `stream_s` as many as took about
        so many seconds at the pace of the one before."""
        self._url = url.rstrip("/")
        self._model = model
        self._rate = rate
        self._stream_tokens = stream_tokens
        self._stream_s = stream_s
        self._random = random.Random(SEED)
        self._start_s = time.monotonic()
        self.outcomes: list[Outcome] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, and then until what is under way has ended."""
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=5.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=600.0)
        tasks: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as kept:
            loops = [
                asyncio.create_task(self._again_and_again(stop, kept, "stream")),
                asyncio.create_task(self._again_and_again(stop, kept, "stream")),
                asyncio.create_task(self._again_and_again(stop, kept, "prefill")),
            ]
            number = 0
            while not stop.is_set():
                number += 1
                task = asyncio.create_task(self._short(number, kept))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._random.expovariate(self._rate)):
                        await stop.wait()
            _, late = await asyncio.wait({*tasks, *loops}, timeout=STOP_S)
            for task in late:
                task.cancel()
                self._note("any", "any", time.monotonic(), "not ended when the load was to stop")

    async def _again_and_again(self, stop: asyncio.Event, kept: httpx.AsyncClient, kind: str) -> None:
        while not stop.is_set():
            tokens = self._stream_tokens if kind == "stream" else 1
            prompt = "Write a long story." if kind == "stream" else self._long_prompt()
            began_s = time.monotonic()
            failed = await self._one(kept, kind, "kept alive", prompt, tokens, stream=kind == "stream")
            if failed:
                await asyncio.sleep(0.5)  # a service that is away must not be asked in a tight loop
            elif kind == "stream" and self._stream_s is not None:
                pace = tokens / (time.monotonic() - began_s)
                self._stream_tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, round(pace * self._stream_s)))

    async def _short(self, number: int, kept: httpx.AsyncClient) -> None:
        prompt = SHORT_PROMPT.format(WORDS[number % len(WORDS)]) + f" ({number})"
        stream = number % 4 < 2
        if number % 2:
            await self._one(kept, "short", "kept alive", prompt, SHORT_TOKENS, stream=stream)
            return
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=5.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as fresh:
            await self._one(fresh, "short", "new", prompt, SHORT_TOKENS, stream=stream)

    async def _one(
        self, client: httpx.AsyncClient, kind: str, connection: str, prompt: str, tokens: int, *, stream: bool
    ) -> bool:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        began_s = time.monotonic()
        try:
            failure = await self._ask(client, body, tokens)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            failure = f"{type(error).__name__}: {error}"
        self._note(kind, connection, began_s, failure)
        return failure is not None

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any], tokens: int) -> str | None:
        url = f"{self._url}/chat/completions"
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                return f"HTTP {answer.status_code}: {(await answer.aread())[:300].decode(errors='replace')}"
            if not body.get("stream"):
                counted = json.loads(await answer.aread())["usage"]["completion_tokens"]
                return None if counted == tokens else f"{counted} tokens instead of {tokens}"
            done, counted = False, None
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return f"an error in the stream: {chunk['error']}"
                    counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
            if not done:
                return "the stream was cut"
            return None if counted == tokens else f"{counted} tokens instead of {tokens}"

    def _long_prompt(self) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(LONG_PROMPT_WORDS))

    def _note(self, kind: str, connection: str, began_s: float, failure: str | None) -> None:
        now_s = time.monotonic()
        self.outcomes.append(
            Outcome(
                kind=kind,
                connection=connection,
                began_s=round(began_s - self._start_s, 3),
                ended_s=round(now_s - self._start_s, 3),
                failure=failure,
            )
        )


def read(path: Path) -> list[Outcome]:
    """The outcomes that a load has written."""
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def _lines(outcomes: list[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        yield json.dumps(asdict(outcome)) + "\n"


async def _main(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    load = SteadyLoad(
        options.url,
        options.model,
        rate=options.rate,
        stream_tokens=options.stream_tokens,
        stream_s=options.stream_seconds,
    )
    await load.run(stop)
    with options.out.open("w", encoding="utf-8") as out:
        out.writelines(_lines(load.outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="base URL of the OpenAI API, with /v1")
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="file for the outcomes, a JSON object a line")
    parser.add_argument("--rate", type=float, default=2.0, help="short requests a second")
    parser.add_argument(
        "--stream-tokens", type=int, default=200, help="tokens of each long stream, or of the first"
    )
    parser.add_argument("--stream-seconds", type=float, help="about how long each further stream takes")
    asyncio.run(_main(parser.parse_args()))
