"""One token through prefill and decode of one revision, when the operator asks whether the revision serves.

It takes the same legs as a client's request, but no place in the queue and no part in what is counted of clients:
it is no SLO event, and pods count it under the class `other`. Its deadline puts it among the urgent ones there, so it
waits behind running work at most for what a pod does not preempt. One runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flowprefill.errors import FlowPrefillError, InvalidRequest
from flowprefill.hosting.responses import error_response
from flowprefill.metrics.control import ControlMetrics
from flowprefill.openai.errors import answer_for
from flowprefill.openai.parse import read_body
from flowprefill.openai.sse import DONE_DATA
from flowprefill.proxy import content, legs
from flowprefill.proxy.answering import unless_client_leaves
from flowprefill.proxy.exchange import PATHS, Services
from flowprefill.proxy.respond import ClientLeft
from flowprefill.proxy.revisions import COLOCATED
from flowprefill.proxy.upstream import PodRefused, open_leg, read_events, read_json
from flowprefill.wire import Endpoint

log = logging.getLogger(__name__)

BUDGET_S = 5.0
"""Its time to first token as pods are told: ahead of patient requests, behind urgent ones."""

MODELS_TIMEOUT_S = 5.0
SLO_CLASS = "round-trip"
PROMPT = "Hello"
MAX_BODY_BYTES = 4096


class _Asked(BaseModel):
    revision: str = Field(min_length=1, max_length=63)


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    """The answer of `GET /v1/models`."""

    data: list[_Model]


class RoundTripFailed(FlowPrefillError):
    """No token came back."""


@dataclass(slots=True, kw_only=True)
class _Trip:
    """Where one round trip is, for what is said of it when its time is over."""

    revision: str
    leg_id: str = field(default_factory=lambda: f"round-trip-{uuid.uuid4().hex[:12]}")
    stage: str = "placement"
    pod: str = ""


class RoundTrips:
    """`POST /v1/round-trip` of the admin port. `api_key` gives a key that pods accept; None where they ask for none.

    One that takes longer than `limit_s` has failed.
    """

    def __init__(
        self,
        services: Services,
        counts: ControlMetrics,
        *,
        served_name: str,
        api_key: Callable[[], str | None],
        limit_s: float,
    ) -> None:
        self._services = services
        self._counts = counts
        self._served_name = served_name
        self._api_key = api_key
        self._limit_s = limit_s
        self._busy = False

    async def answer(self, request: Request) -> Response:
        """200 when a token came back, 503 with the reason when none did, 429 while another one is under way."""
        try:
            revision = await _asked(request)
        except FlowPrefillError as error:
            return error_response(answer_for(error))
        if self._busy:
            body = {"revision": revision, "ok": False, "reason": "another round trip is under way"}
            return JSONResponse(body, status_code=429, headers={"Retry-After": "1"})
        self._busy = True
        answers: list[Response] = []

        async def tried() -> None:
            answers.append(await self._tried(revision))

        try:
            await unless_client_leaves(request.receive, tried())
        except ClientLeft:
            return Response(status_code=499)  # nobody reads it
        finally:
            self._busy = False
        return answers[0]

    async def _tried(self, revision: str) -> Response:
        clock = self._services.clock
        trip = _Trip(revision=revision)
        began_s = clock.now_s()
        reason = ""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._made(trip)
        except TimeoutError:
            reason = f"no answer within {self._limit_s:g} s: it was still in {trip.stage} on {trip.pod or 'no pod'}"
        except PodRefused as refused:
            reason = f"{trip.pod} answered {refused.status} to {trip.stage}: {refused.body[:200].decode(errors='replace')}"
        except FlowPrefillError as error:
            reason = str(error)
        seconds = clock.now_s() - began_s
        self._counts.round_trip(ok=not reason)
        told = {"revision": revision, "reason": reason, "seconds": round(seconds, 6)}
        log.info("round trip", extra=told)
        if reason:
            return JSONResponse({"revision": revision, "ok": False, "reason": reason}, status_code=503)
        return JSONResponse({"revision": revision, "ok": True, "seconds": round(seconds, 6)})

    async def _made(self, trip: _Trip) -> None:
        """Raises FlowPrefillError when no token comes back."""
        services, pods = self._services, self._services.pods
        first = pods.pick_first(trip.revision)
        if first is None:
            usable = ", ".join(r.name for r in pods.revisions) or "none"
            raise RoundTripFailed(
                f"revision {trip.revision!r} has no ready pod in every role; usable revisions: {usable}"
            )
        trip.stage, trip.pod = "asking for the model", first.name
        body = {
            "model": await self._model_of(trip, first),
            "prompt": PROMPT,
            "max_tokens": 1,
            "min_tokens": 1,  # the decode pod then computes the token itself
            "temperature": 0,
        }
        told: dict[str, Any] = {"budget_s": BUDGET_S, "target_s": BUDGET_S, "slo_class": SLO_CLASS}
        if first.role == COLOCATED:
            trip.stage, trip.pod = "prefill and decode", first.name
            await self._token(trip, first, legs.colocated_body(body, **told))
            return
        trip.stage, trip.pod = "prefill", first.name
        kv_params = await self._prefilled(trip, first, legs.prefill_body(body, chat=False, **told))
        pulled = False
        try:
            decode = pods.pick_decode(trip.revision)
            if decode is None:
                raise RoundTripFailed(f"revision {trip.revision!r} has no ready decode pod any more")
            trip.stage, trip.pod = "decode", decode.endpoint.name
            await self._token(trip, decode.endpoint, legs.decode_body(body, kv_params, slo_class=SLO_CLASS))
            pulled = True
        finally:
            if kv_params and not pulled:
                remote_id = kv_params.get("remote_request_id")
                remote_id = remote_id if isinstance(remote_id, str) and remote_id else trip.leg_id
                services.releases.start(first, remote_id, self._headers(trip))

    async def _model_of(self, trip: _Trip, pod: Endpoint) -> str:
        """The name under which the pod serves: another revision may have another. Ours when it does not tell."""
        try:
            answer = await self._services.http.get(
                f"http://{pod.address}/v1/models", headers=self._headers(trip), timeout=MODELS_TIMEOUT_S
            )
            return _Models.model_validate_json(answer.content).data[0].id
        except (httpx.HTTPError, ValidationError, IndexError):
            return self._served_name

    async def _prefilled(self, trip: _Trip, pod: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        path, headers = PATHS["completions"], self._headers(trip)
        async with open_leg(self._services.http, pod, path, body, headers) as response:
            answer = await read_json(pod, response)
        kv_params = legs.kv_params_of(answer)
        if kv_params is None:
            raise RoundTripFailed(f"{pod.name} answered without {legs.KV_PARAMS}; it is no prefill pod")
        return kv_params

    async def _token(self, trip: _Trip, pod: Endpoint, body: dict[str, Any]) -> None:
        """Read a streamed leg to its end; a token must be in it."""
        path, headers = PATHS["completions"], self._headers(trip)
        data: list[str] = []
        async with open_leg(self._services.http, pod, path, body, headers) as response:
            async for events in read_events(pod, response):
                data += events
                if any(map(content.is_error, events)):
                    raise RoundTripFailed(f"{pod.name} answered with an error: {events[-1][:200]}")
        if DONE_DATA not in data:
            raise RoundTripFailed(f"{pod.name} ended its answer without [DONE]")
        if not any(_has_token(content.parse(each) or {}) for each in data):
            raise RoundTripFailed(f"{pod.name} ended its answer without a token")

    def _headers(self, trip: _Trip) -> dict[str, str]:
        key = self._api_key()
        client = [] if key is None else [("authorization", f"Bearer {key}")]
        return legs.leg_headers(client, trip.leg_id)


async def _asked(request: Request) -> str:
    """The revision in the body. Raises InvalidRequest."""
    length = request.headers.get("content-length")
    raw = await read_body(request.stream(), content_length=length, limit_bytes=MAX_BODY_BYTES)
    try:
        return _Asked.model_validate_json(raw).revision
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InvalidRequest(
            f'the body {raw[:100]!r} is not accepted: {problem}; expected is {{"revision": "..."}}'
        ) from None


def _has_token(chunk: dict[str, Any]) -> bool:
    """Whether the chunk has the token, which may be one without any text, and so the reason why the answer ended."""
    return any(choice.get("finish_reason") or choice.get("text") for choice in chunk.get("choices") or ())
