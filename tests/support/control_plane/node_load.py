"""Open-loop load on a service, as its clients see it: run in a node's network by `python -m`.

`node_load URL MODEL RATE` sends a short completion every 1/RATE seconds, in turn on a new and on a kept-alive connection,
without retries, until its standard input closes, and waits for what is in flight. Then it prints one JSON line a request:
`{"start_s", "seconds", "status", "num_tokens", "failure"}`, failure being null when the answer was whole.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

import httpx

NUM_TOKENS = 8
REQUEST_S = 60.0
PROMPTS = ("The weather today is", "Once upon a time there was", "A list of fruits:", "Seconds in an hour:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. Times are in seconds since the first one."""

    start_s: float
    seconds: float
    status: int | None
    num_tokens: int
    failure: str | None


async def stream(
    client: httpx.AsyncClient, url: str, body: dict[str, object], headers: dict[str, str]
) -> tuple[int | None, int, str | None]:
    """Status, tokens received and what went wrong, for one streamed completion."""
    num_tokens, done = 0, False
    try:
        async with client.stream("POST", url, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return answer.status_code, 0, (await answer.aread()).decode(errors="replace")[:300]
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return 200, num_tokens, json.dumps(event["error"])[:300]
                    if event.get("usage"):
                        num_tokens = event["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        return None, num_tokens, f"{type(error).__name__}: {error}"
    if not done:
        return 200, num_tokens, "the stream ended without [DONE]"
    if num_tokens != body["max_tokens"]:
        return 200, num_tokens, f"{num_tokens} tokens instead of {body['max_tokens']}"
    return 200, num_tokens, None


async def offer(url: str, model: str, rate: float) -> list[Outcome]:
    """Send until standard input closes; the outcomes in the order of sending."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    began_s = time.monotonic()
    async with httpx.AsyncClient(limits=limits, timeout=REQUEST_S, trust_env=False) as kept:

        async def one(number: int) -> Outcome:
            body: dict[str, object] = {
                "model": model,
                "prompt": PROMPTS[number % len(PROMPTS)],
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            start_s = time.monotonic()
            if number % 2:
                result = await stream(kept, f"{url}/v1/completions", body, {})
            else:
                async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as fresh:
                    result = await stream(fresh, f"{url}/v1/completions", body, {"connection": "close"})
            status, num_tokens, failure = result
            return Outcome(
                start_s=start_s - began_s,
                seconds=time.monotonic() - start_s,
                status=status,
                num_tokens=num_tokens,
                failure=failure,
            )

        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        sent: list[asyncio.Task[Outcome]] = []
        while not closed.done():
            sent.append(asyncio.create_task(one(len(sent))))
            pause_s = began_s + len(sent) / rate - time.monotonic()
            await asyncio.wait([closed], timeout=max(pause_s, 0.0))
        return list(await asyncio.gather(*sent))


def main() -> None:
    """The command."""
    url, model, rate = sys.argv[1:]
    for outcome in asyncio.run(offer(url, model, float(rate))):
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    main()
