"""The two configuration documents: one read at the start, one watched. A bad live document changes nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from flowprefill.errors import InvalidConfiguration
from flowprefill.proxy.settings import LiveSettings, ProxySettings, live_settings, proxy_settings
from flowprefill.proxy.watching import changes, read_document
from flowprefill_crd import InvalidConfig, LiveConfig, PodConfig

log = logging.getLogger(__name__)

LIVE_FILE = "live.json"


def live_file(path: Path) -> Path:
    """The live document: `path` itself, or `live.json` in the directory `path`."""
    return path / LIVE_FILE if path.is_dir() else path


def read_settings(path: Path) -> tuple[PodConfig, ProxySettings]:
    """The pod configuration. Raises InvalidConfiguration."""
    text = _required(path)
    try:
        config = PodConfig.from_json(text)
    except InvalidConfig as error:
        raise InvalidConfiguration(f"{path}: {error}") from error
    return config, proxy_settings(config)


def read_live(path: Path) -> tuple[str, LiveSettings]:
    """The live document's text and meaning. Raises InvalidConfiguration."""
    file = live_file(path)
    text = _required(file)
    return text, _live(text, file)


async def follow_live(path: Path, seen: str, *, refused: Callable[[], None]) -> AsyncIterator[LiveSettings]:
    """Every good live document after the one whose text is `seen`."""
    file = live_file(path)
    async with aclosing(changes(file, seen)) as texts:
        async for text in texts:
            try:
                if text is None:
                    raise InvalidConfiguration(f"{file} cannot be read")
                yield _live(text, file)
            except InvalidConfiguration as error:
                refused()
                log.warning("live document refused; the last good one stays", extra={"reason": str(error)})


def _live(text: str, file: Path) -> LiveSettings:
    try:
        return live_settings(LiveConfig.from_json(text))
    except (InvalidConfig, AssertionError, ValueError) as error:
        raise InvalidConfiguration(f"{file}: {error}") from error


def _required(path: Path) -> str:
    text = read_document(path)
    if text is None:
        raise InvalidConfiguration(f"{path} cannot be read; a readable UTF-8 JSON file is expected")
    return text
