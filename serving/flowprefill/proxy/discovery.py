"""Where the pods are. The proxy depends on the protocol alone; a file serves the local node, slices a cluster."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.watching import WatchedFile
from flowprefill.wire import Endpoint, EndpointsFile

log = logging.getLogger(__name__)


class Discovery(Protocol):
    """Reports all endpoints of one service. The last report stays true when a source fails."""

    def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        """What is known now, then every change, until cancelled. Never raises for a source that is away."""
        ...


class FileDiscovery:
    """Endpoints in an `EndpointsFile`, replaced atomically by who writes it. Bad content keeps the last good one."""

    def __init__(self, path: Path, *, refused: Callable[[], None] = lambda: None) -> None:
        self._file = WatchedFile(path)
        self._refused = refused

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        yield self._read() or ()
        async with aclosing(self._file.changes()) as changes:
            async for _ in changes:
                endpoints = self._read()
                if endpoints is not None:
                    yield endpoints

    def _read(self) -> tuple[Endpoint, ...] | None:
        try:
            text = self._file.read()
        except InvalidConfiguration as error:
            log.warning("no endpoints file; the last endpoints stay", extra={"reason": str(error)})
            return None
        try:
            endpoints = EndpointsFile.model_validate_json(text).endpoints
        except ValidationError as error:
            self._refused()
            log.warning(
                "endpoints refused; the last good ones stay",
                extra={"path": str(self._file.path), "reason": str(error)},
            )
            return None
        names = [endpoint.name for endpoint in endpoints]
        if len(set(names)) < len(names):
            self._refused()
            log.warning("endpoints refused: a name occurs twice", extra={"path": str(self._file.path)})
            return None
        return endpoints
