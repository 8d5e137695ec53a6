"""What the operator's own port answers to probes and to Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp.test_utils import TestClient, TestServer

from flowprefill_operator.controller.http import health_app, listen
from flowprefill_operator.controller.metrics import OperatorMetrics


@dataclass(slots=True)
class State:
    stalled: str | None = None
    unready: str | None = "not synced yet"


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
async def client(state: State) -> AsyncIterator[TestClient]:  # type: ignore[type-arg]
    metrics = OperatorMetrics()
    metrics.leader.set(1)
    app = health_app(metrics.registry, stalled=lambda: state.stalled, unready=lambda: state.unready)
    async with TestClient(TestServer(app)) as found:
        yield found


async def test_an_operator_is_alive_until_it_is_stuck_and_says_why_then(
    client: TestClient,  # type: ignore[type-arg]
    state: State,
) -> None:
    assert (await client.get("/healthz")).status == 200
    state.stalled = "the resync loop has not gone round for 400 s"
    answer = await client.get("/healthz")
    assert (answer.status, await answer.text()) == (503, state.stalled)


async def test_an_operator_is_ready_once_it_is_at_work(
    client: TestClient,  # type: ignore[type-arg]
    state: State,
) -> None:
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "not synced yet")
    assert (await client.get("/healthz")).status == 200, "not being ready is no reason for a restart"
    state.unready = None
    assert (await client.get("/readyz")).status == 200


async def test_metrics_are_text_with_the_operator_s_own_prefix(client: TestClient) -> None:  # type: ignore[type-arg]
    answer = await client.get("/metrics")
    text = await answer.text()
    assert answer.status == 200
    assert answer.content_type == "text/plain"
    assert "flowprefill_operator_leader 1.0" in text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith("flowprefill_operator_") for name in names), names


async def test_a_port_that_is_taken_is_an_error_and_port_0_is_any() -> None:
    app = health_app(OperatorMetrics().registry, stalled=lambda: None, unready=lambda: None)
    runner, port = await listen(app, 0)
    try:
        assert port > 0
        other = health_app(OperatorMetrics().registry, stalled=lambda: None, unready=lambda: None)
        with pytest.raises(OSError, match=str(port)):
            await listen(other, port)
    finally:
        await runner.cleanup()
