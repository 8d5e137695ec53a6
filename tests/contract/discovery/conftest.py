"""The sources of endpoints that can be had anywhere; `tests/cluster` has the real API server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from flowprefill.proxy.discovery import Discovery, FileDiscovery
from flowprefill.proxy.kubernetes_discovery import KubernetesDiscovery
from flowprefill.wire import Endpoint, EndpointsFile
from support.counts import Counted
from support.discovery import Source
from support.slices import slices_of
from support.slices_api import FakeSlicesApi, fake_slices, status


class FileSource:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.discovery: Discovery = FileDiscovery(path)

    async def publish(self, endpoints: Sequence[Endpoint]) -> None:
        part = self._path.with_name("part")
        part.write_text(EndpointsFile(endpoints=tuple(endpoints)).model_dump_json())
        os.replace(part, self._path)

    async def break_off(self) -> None:
        self._path.rename(self._path.with_name("away"))

    async def mend(self) -> None:
        self._path.with_name("away").rename(self._path)


class FakeApiSource:
    def __init__(self, fake: FakeSlicesApi, discovery: Discovery) -> None:
        self._fake = fake
        self.discovery = discovery

    async def publish(self, endpoints: Sequence[Endpoint]) -> None:
        self._fake.publish(slices_of(endpoints))

    async def break_off(self) -> None:
        self._fake.refuse = status(503, "etcd has no leader")
        self._fake.cut_watches()

    async def mend(self) -> None:
        self._fake.refuse = lambda request: None


@pytest.fixture(params=["file", "kubernetes"])
async def source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Source]:
    if request.param == "file":
        yield FileSource(tmp_path / "endpoints.json")
        return
    async with fake_slices() as (fake, client):
        yield FakeApiSource(fake, KubernetesDiscovery(client, counts=Counted(), longest_pause_s=0.05))
