"""The live document: read at start, watched, the last good one kept."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from flowprefill.errors import InvalidConfiguration
from flowprefill.metrics.engine import PodMetrics
from flowprefill.scheduling.settings import Ageing, SchedulerSettings
from flowprefill_crd import InvalidConfig, LiveConfig, PodConfig

log = logging.getLogger(__name__)

LIVE_FILE = "live.json"
POLL_S = 0.5
"""How often the file is looked at. A mounted ConfigMap changes by moving a symlink, which no inotify watch on
the file itself sees, and one stat costs a microsecond."""

MAX_DOCUMENT_BYTES = 4 * 2**20


def read_pod_config(path: Path) -> PodConfig:
    """The pod's configuration. Raises `InvalidConfiguration` naming the file and every problem."""
    try:
        return PodConfig.from_json(_read(path))
    except InvalidConfig as error:
        raise InvalidConfiguration(f"{path}: {error}") from error


def read_live_config(path: Path) -> LiveConfig:
    """The live document in `path`, or in `live.json` of the directory `path`."""
    file = path / LIVE_FILE if path.is_dir() else path
    try:
        live = LiveConfig.from_json(_read(file))
        scheduler_settings(live)
        return live
    except (InvalidConfig, ValueError) as error:
        raise InvalidConfiguration(f"{file}: {error}") from error


def scheduler_settings(live: LiveConfig) -> SchedulerSettings:
    """The scheduler's part of the live document."""
    return SchedulerSettings(
        policy=live.policy,
        preemption=live.preemption,
        batch_token_budget=live.batch_token_budget,
        chunk_tokens=live.chunk_tokens,
        max_suspended=live.max_suspended,
        recompute_suspended=live.recompute_suspended_under_pressure,
        ageing=(
            Ageing(factor=float(live.ageing.factor), share=live.ageing.share_percent / 100)
            if live.ageing.enabled
            else None
        ),
        queue_limit=live.queue_limit,
        online_correction=live.online_correction,
    )


class LiveDocument:
    """The live document in use. `on_change` is called with every good one that replaces it."""

    def __init__(
        self,
        path: Path,
        metrics: PodMetrics,
        *,
        on_change: Callable[[LiveConfig], None] = lambda live: None,
        poll_s: float = POLL_S,
    ) -> None:
        self._path = path
        self._metrics = metrics
        self._on_change = on_change
        self._poll_s = poll_s
        self._stamp = self._look()
        self._current = read_live_config(path)
        metrics.live_generation(self._current.generation)

    @property
    def current(self) -> LiveConfig:
        return self._current

    def subscribe(self, on_change: Callable[[LiveConfig], None]) -> None:
        """Replace the callback."""
        self._on_change = on_change

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            self.look()

    def look(self) -> None:
        """Take the document over if the file has changed and is good."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            live = read_live_config(self._path)
        except InvalidConfiguration as error:
            self._metrics.live_document_refused()
            log.warning(
                "live document refused; the last good one stays",
                extra={"reason": str(error), "generation": self._current.generation},
            )
            return
        if live == self._current:
            return
        self._current = live
        self._metrics.live_generation(live.generation)
        log.info("live document in use", extra={"generation": live.generation})
        self._on_change(live)

    def _look(self) -> tuple[int, int, int] | None:
        file = self._path / LIVE_FILE if self._path.is_dir() else self._path
        try:
            found = os.stat(file)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise InvalidConfiguration(
            f"{path} cannot be read: {error.strerror or type(error).__name__}"
        ) from None
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidConfiguration(
            f"{path} has more than {MAX_DOCUMENT_BYTES} bytes, which is the most accepted"
        )
    return text
