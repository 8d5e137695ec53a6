"""The two configuration documents: one read at the start, one watched. A bad live document changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.watching import WatchedFile
from flowprefill_crd import InvalidConfig, LiveConfig, PodConfig

log = logging.getLogger(__name__)

LIVE_FILE = "live.json"


class Meaning(Protocol):
    """What a process makes of a live document."""

    @property
    def generation(self) -> int: ...


T = TypeVar("T", bound=Meaning)


def read_pod_config(path: Path) -> PodConfig:
    """The pod's configuration. Raises `InvalidConfiguration` naming the file and every problem."""
    text = WatchedFile(path).read()
    try:
        return PodConfig.from_json(text)
    except InvalidConfig as error:
        raise InvalidConfiguration(f"{path}: {error}") from error


class LiveDocument(Generic[T]):
    """The live document in use, as `meaning` understands it: the last good one.

    `path` is the document, or the directory (a mounted ConfigMap) with `live.json` in it. `meaning` may raise
    `ValueError` for what is well formed and still cannot be used. Raises `InvalidConfiguration` when the first
    document is not good.
    """

    def __init__(self, path: Path, meaning: Callable[[LiveConfig], T]) -> None:
        self._file = WatchedFile(path / LIVE_FILE if path.is_dir() else path)
        self._meaning = meaning
        self._changed: Callable[[T], None] = lambda meaning: None
        self._refused: Callable[[], None] = lambda: None
        self._current = self._read()

    @property
    def current(self) -> T:
        return self._current

    def subscribe(self, *, changed: Callable[[T], None], refused: Callable[[], None]) -> None:
        """Call `changed` with every good document that replaces the one in use, `refused` for every bad one."""
        self._changed, self._refused = changed, refused

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        async with aclosing(self._file.changes()) as changes:
            async for _ in changes:
                self.take()

    def take(self) -> None:
        """Take over what the file holds now, if it is good."""
        try:
            meaning = self._read()
        except InvalidConfiguration as error:
            self._refused()
            log.warning(
                "live document refused; the last good one stays",
                extra={"reason": str(error), "generation": self._current.generation},
            )
            return
        if meaning == self._current:
            return
        self._current = meaning
        log.info("live document in use", extra={"generation": meaning.generation})
        self._changed(meaning)

    def _read(self) -> T:
        text = self._file.read()
        try:
            return self._meaning(LiveConfig.from_json(text))
        except (InvalidConfig, ValueError) as error:
            raise InvalidConfiguration(f"{self._file.path}: {error}") from error
