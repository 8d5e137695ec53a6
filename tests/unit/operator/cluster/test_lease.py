"""Waiting for a Lease that is not to be had."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowprefill_operator.cluster.lease import LeaseName, lead
from support.cluster_objects import status_body
from support.small_api import Answer, Request, SmallApi, small_api

AT = LeaseName(namespace="ns", name="it", identity="me", lease_s=3)
FREE = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "it", "namespace": "ns", "resourceVersion": "1"},
    "spec": {"holderIdentity": ""},
}


@asynccontextmanager
async def waiting(answers: dict[str, Answer]) -> AsyncIterator[SmallApi]:
    """A process that waits for a Lease of an API server that answers so, by the request's method."""

    def answer(request: Request) -> Answer:
        return answers[request.method]

    async with small_api() as (api, cluster):
        api.answer = answer
        client: Any = cluster._api

        async def work() -> None:
            raise AssertionError("it leads")

        task = asyncio.create_task(lead(client, AT, work, seen=lambda seen: None))
        try:
            yield api
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("answers", "message", "verb"),
    [
        ({"GET": (403, status_body(403, "Forbidden", "no"))}, "lease cannot be read", "get"),
        (
            {
                "GET": (404, status_body(404, "NotFound", "no")),
                "POST": (403, status_body(403, "Forbidden", "no")),
            },
            "lease cannot be made",
            "create",
        ),
        (
            {"GET": (200, FREE), "PUT": (403, status_body(403, "Forbidden", "no"))},
            "lease cannot be updated",
            "update",
        ),
    ],
)
async def test_why_a_lease_cannot_be_had_is_one_line_in_the_log_however_often_it_is_tried(
    caplog: pytest.LogCaptureFixture, answers: dict[str, Answer], message: str, verb: str
) -> None:
    async with waiting(answers) as api, asyncio.timeout(60):
        while sum(request.method == "GET" for request in api.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == message
    assert (vars(record)["verb"], vars(record)["lease"], record.exc_info) == (verb, "ns/it", None)
