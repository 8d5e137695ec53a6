"""What a proxy's admin port answers the operator: the real proxy and the hollow one of the cluster tests alike."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from support.control_plane.hollow_admin import HollowAdmin, HollowPod
from support.control_plane.hollow_machine import pod_addresses
from support.proxy_under_test import LIVE, Pair, proxy_with_pods

Json = dict[str, Any]

WINDOWS = {"5m", "1h"}


class Port(ABC):
    """An admin port of a proxy of revision r1 that has a ready pair of r1."""

    url: str

    @abstractmethod
    def live(self, document: Json) -> None:
        """Give the proxy a new live document."""


class Real(Port):
    def __init__(self, pair: Pair) -> None:
        self._running = pair.running
        self.url = pair.running.admin_url

    def live(self, document: Json) -> None:
        self._running.write_live(document)


class Hollow(Port):
    def __init__(self, admin: HollowAdmin, url: str) -> None:
        self._admin = admin
        self.url = url

    def live(self, document: Json) -> None:
        self._admin.document("default", "demo-live", {"live.json": json.dumps(document)})


def hollow_pod(role: str) -> HollowPod:
    return HollowPod(
        namespace="default",
        name=f"demo-{role}",
        service="demo",
        role=role,
        revision="r1",
        live_map="demo-live",
        port=9000,
        ready=True,
    )


@pytest.fixture(params=["real", "hollow"])
async def port(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Port]:
    kind: Literal["real", "hollow"] = request.param
    if kind == "real":
        async with proxy_with_pods(tmp_path) as pair:
            yield Real(pair)
        return
    admin = HollowAdmin()
    with ExitStack() as stack:
        addresses = stack.enter_context(pod_addresses())
        await admin.open()
        try:
            for role in ("prefill", "decode", "proxy"):
                address = next(addresses)
                await admin.runs(address, hollow_pod(role))
            found = Hollow(admin, f"http://{address}:9000")
            found.live(LIVE)
            yield found
        finally:
            await admin.close()


@pytest.fixture
async def http(port: Port) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=port.url, trust_env=False, timeout=30.0) as client:
        yield client


async def test_config_tells_role_revision_and_generation_and_nothing_else(
    port: Port, http: httpx.AsyncClient
) -> None:
    answer = await http.get("/v1/config")
    assert answer.status_code == 200
    assert answer.json() == {"role": "proxy", "revision": "r1", "generation": 1}


async def test_the_generation_follows_the_live_document(port: Port, http: httpx.AsyncClient) -> None:
    port.live(LIVE | {"generation": 5})
    seen: list[int] = []

    async def look() -> None:
        while not seen or seen[-1] != 5:
            seen.append((await http.get("/v1/config")).json()["generation"])

    await asyncio.wait_for(look(), 20)
    assert set(seen) <= {1, 5}
    assert (await http.get("/v1/attainment")).json()["generation"] == 5


async def test_attainment_has_every_class_with_counts_in_windows(port: Port, http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/attainment")
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"generation", "classes"}
    assert set(body["classes"]) == {entry["name"] for entry in LIVE["sloClasses"]}
    for counts in body["classes"].values():
        assert set(counts) == {"met", "missed", "windows"}
        assert set(counts["windows"]) == WINDOWS
        for window in (counts, *counts["windows"].values()):
            assert (window["met"], window["missed"]) == (0, 0)


async def test_a_round_trip_of_a_ready_revision_succeeds_and_takes_time(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/round-trip", json={"revision": "r1"})
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"revision", "ok", "seconds"}
    assert (body["revision"], body["ok"]) == ("r1", True)
    assert 0 < body["seconds"] < 30


async def test_a_round_trip_of_a_revision_without_pods_is_a_503_with_the_reason(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/v1/round-trip", json={"revision": "r9"})
    assert answer.status_code == 503
    body = answer.json()
    assert set(body) == {"revision", "ok", "reason"}
    assert (body["revision"], body["ok"]) == ("r9", False)
    assert "r9" in body["reason"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"], ids=["empty", "list", "nothing", "bytes"])
async def test_a_round_trip_without_a_revision_is_a_400(http: httpx.AsyncClient, content: bytes) -> None:
    answer = await http.post("/v1/round-trip", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_probes_of_a_ready_proxy_are_200(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok", "phase": "ready"}
    answer = await http.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "phase": "ready"})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/config", 405), ("GET", "/v1/round-trip", 405), ("GET", "/v1/nothing", 404)],
)
async def test_what_is_not_served_is_refused_as_elsewhere(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
