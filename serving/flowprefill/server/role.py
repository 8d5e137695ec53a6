"""What the three roles have in common: the pod around them, and what they offer to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from flowprefill.engines.protocol import Engine, EngineSpec
from flowprefill.errors import NotFound
from flowprefill.hosting.documents import LiveDocument
from flowprefill.hosting.lifecycle import Lifecycle
from flowprefill.metrics.engine import EngineMetrics
from flowprefill.openai.parse import ParsedRequest, parse_request, read_body
from flowprefill.openai.requests import Endpoint
from flowprefill.openai.responses import model_card, models_list
from flowprefill.server.state import StateHub
from flowprefill.server.text import Texts
from flowprefill.wire import PodState
from flowprefill_crd import LiveConfig, PodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What every role works with."""

    role: str
    config: PodConfig
    live: LiveDocument[LiveConfig]
    lifecycle: Lifecycle
    metrics: EngineMetrics
    states: StateHub
    engine: Engine
    texts: Texts
    created: int
    """Unix time of the pod's start, in seconds."""

    @property
    def spec(self) -> EngineSpec:
        """What the engine says of itself."""
        return self.engine.spec

    async def parsed(self, request: Request, endpoint: Endpoint) -> ParsedRequest:
        """The request's body, checked, for the model that is served here."""
        raw = await read_body(
            request.stream(),
            content_length=request.headers.get("content-length"),
            limit_bytes=self.config.proxy.max_body_bytes,
        )
        parsed = parse_request(endpoint, raw)
        self.check_model(parsed.request.model)
        return parsed

    def check_model(self, model: str) -> None:
        """Raise `NotFound` unless `model` is the served name."""
        served = self.config.model.served_name
        if model != served:
            raise NotFound(f"model {model[:200]!r} is not served here; accepted is {served!r}")

    def model_routes(self) -> list[BaseRoute]:
        """`GET /v1/models` and `GET /v1/models/{name}`."""
        served, length = self.config.model.served_name, self.texts.max_model_len

        async def models(request: Request) -> Response:
            return JSONResponse(models_list([served], created=self.created, max_model_len=length))

        async def model(request: Request) -> Response:
            self.check_model(request.path_params["name"])
            return JSONResponse(model_card(served, created=self.created, max_model_len=length))

        return [
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
        ]


class Role(Protocol):
    """One role's part of a pod."""

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """Paths of the API port."""
        ...

    def state(self, sequence: int) -> PodState:
        """The pod's state now."""
        ...

    def reconfigure(self, live: LiveConfig) -> None:
        """A new live document is in use."""
        ...

    def before_scrape(self) -> None:
        """Bring gauges up to date."""
        ...

    def failure(self) -> str | None:
        """Why this pod can work no more; None while it can."""
        ...

    def history(self) -> dict[str, object]:
        """The last tasks and preemptions (`server.history`)."""
        ...

    async def start(self) -> None:
        """Start threads and listen, before the first request."""
        ...

    async def drained(self) -> None:
        """Return once nobody needs this pod any more, now that no request is in flight."""
        ...

    async def close(self) -> None:
        """End threads and connections. Not yet the engine."""
        ...
