"""Answers one client request: from complete body to last byte, whatever happens on the way.

1. read and check the body; stamp the arrival
2. resolve the SLO, estimate the length
3. one exchange per prompt; their events become a stream or one answer
4. count the request, once, at its end

A client that leaves cancels 2 and 3, which frees everything they hold.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from flowprefill.errors import (
    FlowPrefillError,
    InvalidRequest,
    NotFound,
    RequestTimeout,
    Unavailable,
    UpstreamFailed,
)
from flowprefill.openai.collect import ResponseCollector
from flowprefill.openai.headers import REQUEST_ID_HEADER
from flowprefill.openai.parse import ParsedRequest, parse_request, read_body
from flowprefill.openai.requests import CompletionRequest, Endpoint, Prompt
from flowprefill.openai.sse import DONE, STREAM_HEADERS
from flowprefill.proxy import content
from flowprefill.proxy.estimate import Estimate, Estimator
from flowprefill.proxy.exchange import Call, Exchange, Services
from flowprefill.proxy.fanout import Batch, interleaved, numbered
from flowprefill.proxy.merge import Merger
from flowprefill.proxy.record import Ledger, Record
from flowprefill.proxy.respond import Answer, ClientLeft
from flowprefill.proxy.settings import LiveSettings, ProxySettings
from flowprefill.proxy.slo import Slo, resolve
from flowprefill.proxy.upstream import LegFailed, PodRefused
from flowprefill.request import Request

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
INLINE_BYTES = 1 << 13
"""Bodies up to this size are parsed and tokenized on the event loop, longer ones in a thread."""

HEADER_DEBUG = "x-flowprefill-debug"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Answerer:
    """The endpoint of one OpenAI path, as an ASGI app. `live` is replaced when the live document changes."""

    api: Endpoint
    settings: ProxySettings
    services: Services
    estimator: Estimator
    ledger: Ledger
    live: LiveSettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(request_id=scope["state"]["request_id"], api=self.api)
        answer = Answer(send, record, debug=_is_on(Headers(scope=scope).get(HEADER_DEBUG)))
        try:
            body = await self._body(scope, receive)
            record.arrival_s = self.services.clock.now_s()
            await unless_client_leaves(receive, self._serve(body, scope, answer))
        except ClientLeft:
            record.status = record.status if answer.ended else None
        except (
            asyncio.CancelledError
        ):  # the proxy stops and has waited long enough; this is the request's top
            await answer.fail(Unavailable("the proxy stopped before this request was answered"))
        except PodRefused as refused:
            await answer.pass_on(refused)
        except LegFailed as failed:
            # Where no pod began on it, or the pod died under it, the client may simply try again.
            gone = Unavailable("no pod could be reached for this request; try again in a moment")
            again = failed.lost or not failed.accepted
            await answer.fail(gone if again and not answer.started else failed)
        except Exception as error:  # the top of a request
            if not isinstance(error, FlowPrefillError):
                log.exception("request failed", extra={"request_id": record.request_id})
            await answer.fail(error)
        finally:
            self.ledger.close(record, self.services.clock.now_s())

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = Headers(scope=scope).get("content-length")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await read_body(
                    chunks_of(receive), content_length=length, limit_bytes=self.settings.max_body_bytes
                )
        except TimeoutError:
            raise InvalidRequest(f"the body was not complete within {BODY_TIMEOUT_S:.0f} s") from None

    async def _serve(self, body: bytes, scope: Scope, answer: Answer) -> None:
        exchanges: list[Exchange] = []
        try:
            async with asyncio.timeout(self.settings.request_timeout_s) as limit:
                parsed = await self._prepared(body, scope, answer.record, exchanges)
                async with aclosing(interleaved(exchanges)) as events:
                    if parsed.request.stream:
                        await self._stream(parsed, exchanges, events, answer)
                    else:
                        await self._whole(parsed, exchanges, events, answer)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._too_late(exchanges, answer.record) from None

    def _too_late(self, exchanges: Sequence[Exchange], record: Record) -> RequestTimeout:
        """The error of a request that is over its time, which says in what: a stuck pod and an endless answer differ."""
        late = next((e for e in exchanges if e.stage != "done"), None)
        stage = "preparation" if late is None else late.stage
        log.warning(
            "request timed out",
            extra={
                "request_id": record.request_id,
                "slo_class": record.slo.slo_class.name if record.slo is not None else "",
                "stage": stage,
                "pod": "" if late is None else late.pod,
                "seconds": round(self._elapsed_s(record), 3),
                "ttft_s": record.ttft_s,
            },
        )
        limit = f"the request was not answered within {self.settings.request_timeout_s:g} s"
        if stage == "answer":
            return RequestTimeout(f"{limit}: its answer is still being generated; bound it with max_tokens")
        return RequestTimeout(f"{limit}: it was still in {stage}")

    async def _prepared(
        self, body: bytes, scope: Scope, record: Record, exchanges: list[Exchange]
    ) -> ParsedRequest:
        """The request that `body` is; what it needs of pods is added to `exchanges`."""
        parsed = await _maybe_in_thread(len(body), parse_request, self.api, body)
        request = parsed.request
        if request.model != self.settings.served_name:
            raise NotFound(
                f"the model {request.model[:100]!r} is not served; served is {self.settings.served_name!r}"
            )
        headers = [(k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in scope["headers"]]
        slo = resolve(headers, parsed.body, self.live.classes)
        for source, reason in slo.invalid:
            self.services.metrics.slo_invalid(source, reason)
        record.slo, record.streaming = slo, request.stream
        estimates = [
            (prompt, await _maybe_in_thread(len(body), self.estimator.estimate, request, prompt))
            for prompt in _prompts(parsed)
        ]
        leg_id = _leg_id(record.request_id, dict(headers).get(REQUEST_ID_HEADER))
        for index, (prompt, estimate) in enumerate(estimates):
            alone = len(estimates) == 1
            call = Call(
                request_id=leg_id if alone else f"{leg_id}-{index}",
                api=self.api,
                body=parsed.body if alone else {**parsed.body, "prompt": prompt},
                headers=tuple(headers),
                slo=slo,
                arrival_s=_arrival_s(record),
                request=self._queued(leg_id if alone else f"{leg_id}-{index}", estimate, slo, record),
                num_choices=request.n,
                measured=self._on_measured(estimate),
            )
            exchanges.append(Exchange(call, self.services))
        self.services.metrics.overhead(self._elapsed_s(record))
        return parsed

    def _queued(self, request_id: str, estimate: Estimate, slo: Slo, record: Record) -> Request:
        """The request as the queue orders it: its deadline is the prefill's, what follows is taken off."""
        follow_s = 0.0 if self.services.pods.one_leg else self.services.follow_up.p90_s("")
        arrival_s = _arrival_s(record)
        return Request(
            request_id=request_id,
            num_prompt_tokens=estimate.num_tokens,
            arrival_s=arrival_s,
            deadline_s=arrival_s + slo.ttft_s - follow_s,
            ttft_slo_s=slo.ttft_s,
            slo_class=slo.slo_class.name,
            weight=slo.slo_class.weight,
            shed_when_infeasible=slo.slo_class.shed_when_infeasible,
            prefix_hashes=estimate.hashes,
        )

    def _on_measured(self, estimate: Estimate) -> Callable[[int], None]:
        def measured(num_prompt_tokens: int) -> None:
            self.estimator.measured(estimate, num_prompt_tokens)
            if num_prompt_tokens > 0:
                self.services.metrics.prompt_length(estimate.num_tokens / num_prompt_tokens)

        return measured

    async def _stream(
        self,
        parsed: ParsedRequest,
        exchanges: list[Exchange],
        events: AsyncIterator[Batch],
        answer: Answer,
    ) -> None:
        merger = _merger(parsed, exchanges)
        held: list[str] = []
        async for index, batch in events:
            exchange = exchanges[index]
            token = exchange.timing.first_token_s is None and any(map(self._has_token, batch))
            held += numbered(merger, index, batch)
            if answer.debug and not answer.started and not token:
                continue  # the debug headers tell the TTFT, so they leave with the first token
            if not answer.started:
                await answer.start(200, STREAM_HEADERS, self._elapsed_s(answer.record))
            await answer.write(content.encode_events(held))
            held = []
            if token:
                self._token_left(exchange, answer.record)
            if any(map(content.is_error, batch)):
                raise UpstreamFailed("a pod ended its answer with an error")
        if not answer.started:
            await answer.start(200, STREAM_HEADERS, self._elapsed_s(answer.record))
        if merger is not None and parsed.request.include_usage:
            usage = merger.usage_chunk()
            held += [json.dumps(usage, separators=(",", ":"))] if usage is not None else []
        self._without_tokens(exchanges, answer.record)
        await answer.finish(content.encode_events(held) + DONE)

    async def _whole(
        self,
        parsed: ParsedRequest,
        exchanges: list[Exchange],
        events: AsyncIterator[Batch],
        answer: Answer,
    ) -> None:
        merger = _merger(parsed, exchanges)
        collector = ResponseCollector(self.api)
        async for index, batch in events:
            exchange = exchanges[index]
            if exchange.timing.first_token_s is None and any(map(self._has_token, batch)):
                self._token_left(exchange, answer.record)
            for data in numbered(merger, index, batch):
                if content.is_error(data):
                    raise UpstreamFailed(f"a pod ended its answer with an error: {data[:200]}")
                collector.add(content.parse(data) or {})
        usage = merger.usage_chunk() if merger is not None else None
        if usage is not None:
            collector.add(usage)
        body = json.dumps(collector.response(), ensure_ascii=False, separators=(",", ":"))
        self._without_tokens(exchanges, answer.record)
        await answer.start(200, {"content-type": "application/json"}, answer.record.ttft_s or 0.0)
        await answer.finish(body.encode("utf-8", "surrogatepass"))

    def _has_token(self, data: str) -> bool:
        chunk = content.parse(data)
        return chunk is not None and content.has_token(self.api, chunk)

    def _elapsed_s(self, record: Record) -> float:
        return self.services.clock.now_s() - _arrival_s(record)

    def _token_left(self, exchange: Exchange, record: Record) -> None:
        now_s = self.services.clock.now_s()
        exchange.first_token(now_s)
        record.first_token(exchange.timing, now_s)

    def _without_tokens(self, exchanges: list[Exchange], record: Record) -> None:
        """An answer without any text has its first token, the end of sequence, when it ends."""
        if record.ttft_s is None:
            self._token_left(exchanges[0], record)


async def unless_client_leaves(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do `work` while the client listens; cancel it and raise ClientLeft once the client is gone."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        working.result()
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def chunks_of(receive: Receive) -> AsyncIterator[bytes]:
    """The chunks of a request's body. Raises ClientLeft."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _maybe_in_thread(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    if size <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _is_on(value: str | None) -> bool:
    """Whether a header switches something on: it is there, and does not say no."""
    return value is not None and value.strip().lower() not in ("", "0", "false", "no", "off")


def _arrival_s(record: Record) -> float:
    assert record.arrival_s is not None, "the body is complete"
    return record.arrival_s


def _prompts(parsed: ParsedRequest) -> list[Prompt | None]:
    request = parsed.request
    return list(request.prompt) if isinstance(request, CompletionRequest) else [None]


def _merger(parsed: ParsedRequest, exchanges: list[Exchange]) -> Merger | None:
    if len(exchanges) == 1:
        return None
    request = parsed.request
    return Merger(
        num_prompts=len(exchanges),
        num_choices=request.n,
        include_usage=request.stream and request.include_usage,
    )


def _leg_id(request_id: str, from_client: str | None) -> str:
    """The id that pods see. Clients may repeat theirs, and pods keep KV by id, so theirs is made unique."""
    return f"{request_id[:100]}-{uuid.uuid4().hex[:8]}" if from_client == request_id else request_id
