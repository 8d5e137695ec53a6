"""kopf as it is set up: what it may watch, and what it must never do."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import kopf
import pytest
from kubernetes.aio.client import Configuration

from flowprefill_operator.controller.handlers import (
    SILENT_WATCH_S,
    EndlessBackoffs,
    connection,
    quieten,
    registry,
    settings,
)
from flowprefill_operator.kinds import PODS, SERVICES, WATCHED, Kind

SELECTOR = "app.kubernetes.io/managed-by=flowprefill-operator,flowprefill.io/service"


def handlers(told: list[Any] | None = None) -> kopf.OperatorRegistry:
    seen = [] if told is None else told
    return registry(
        on_service=lambda event: seen.append((SERVICES, event)),
        on_object=lambda kind, event: seen.append((kind, event)),
        configuration=Configuration(host="http://127.0.0.1:1"),
    )


def test_no_handler_would_put_a_finalizer_on_a_service() -> None:
    """Timers, daemons and handlers of changes do; those of raw events do not."""
    found: Any = handlers()
    assert list(found._spawning.get_all_handlers()) == []
    assert list(found._changing.get_all_handlers()) == []
    assert len(list(found._watching.get_all_handlers())) == len(WATCHED) + 1


@pytest.mark.parametrize("kind", [*WATCHED, SERVICES], ids=lambda kind: kind.kind)
def test_what_a_watch_tells_is_passed_on_with_its_kind(kind: Kind) -> None:
    told: list[Any] = []
    found: Any = handlers(told)
    (handler,) = [
        h
        for h in found._watching.get_all_handlers()
        if (h.selector.group, h.selector.version, h.selector.any_name)
        in ((kind.group, kind.version, kind.plural), (kind.group or "", kind.version, kind.plural))
    ]
    event = {"type": "MODIFIED", "object": {"metadata": {"name": "a"}}}
    asyncio.run(handler.fn(event=event, body={}, logger=None))
    assert told == [(kind, event)]


def test_every_watched_kind_is_narrowed_by_the_server_but_the_services() -> None:
    selectors = settings(clusterwide=True).watching.label_selectors
    for kind in WATCHED:
        assert selectors[kind.group, kind.version, kind.plural] == SELECTOR
    assert (SERVICES.group, SERVICES.version, SERVICES.plural) not in selectors


def test_a_watch_that_was_silently_cut_ends_within_the_90_seconds_in_which_drift_is_to_be_mended() -> None:
    """A bookmark comes each minute, so a shorter silence may be none."""
    assert settings(clusterwide=True).watching.inactivity_timeout == SILENT_WATCH_S
    assert 60 < SILENT_WATCH_S < 90


def test_kopf_writes_no_events_of_its_own() -> None:
    assert settings(clusterwide=True).posting.enabled is False


def test_namespaces_are_looked_for_only_by_an_operator_of_all_of_them() -> None:
    assert settings(clusterwide=True).scanning.disabled is False
    assert settings(clusterwide=False).scanning.disabled is True


def test_pauses_between_tries_grow_stay_short_and_never_end() -> None:
    pauses = list(itertools.islice(EndlessBackoffs(), 1000))
    assert pauses == sorted(pauses)
    assert pauses[-1] == max(pauses) <= 10
    # Each use begins anew.
    backoffs = EndlessBackoffs()
    assert next(iter(backoffs)) == next(iter(backoffs))


async def test_credentials_are_fresh_each_time_they_are_asked_for() -> None:
    configuration = Configuration(host="https://api.example")
    configuration.ssl_ca_cert = "/ca.crt"
    tokens = iter(["first", "second"])

    async def rotate(found: Configuration) -> None:
        found.api_key["BearerToken"] = f"bearer {next(tokens)}"

    configuration.refresh_api_key_hook = rotate
    first, second = await connection(configuration), await connection(configuration)
    assert (first.server, first.ca_path, first.insecure) == ("https://api.example", "/ca.crt", False)
    assert [(c.scheme, c.token) for c in (first, second)] == [("Bearer", "first"), ("Bearer", "second")]


async def test_a_user_s_certificate_is_passed_on_and_no_token_is_none() -> None:
    configuration = Configuration(host="https://api.example")
    configuration.cert_file, configuration.key_file, configuration.verify_ssl = "/c", "/k", False
    found = await connection(configuration)
    assert (found.certificate_path, found.private_key_path, found.token) == ("/c", "/k", None)
    assert found.insecure


def test_kopf_s_lines_name_the_object_and_carry_no_settings() -> None:
    logger = logging.getLogger("kopf.objects")
    before = (logger.level, list(logger.filters))
    try:
        quieten()
        record = logging.makeLogRecord(
            {
                "settings": object(),
                "k8s_skip": True,
                "k8s_ref": {"kind": PODS.kind, "namespace": "ns", "name": "p"},
            }
        )
        assert logger.filter(record)
        assert vars(record)["object"] == "Pod ns/p"
        assert {"settings", "k8s_skip", "k8s_ref"}.isdisjoint(vars(record))
        assert not logger.isEnabledFor(logging.INFO)
        # What ends kopf is told once, by whoever began it.
        assert not logging.getLogger("kopf._core.reactor.running").isEnabledFor(logging.ERROR)
        observation = logging.getLogger("kopf._core.reactor.observation")
        absent = "Unresolved resources cannot be served (try creating their CRDs): podmonitors"
        assert not observation.filter(logging.makeLogRecord({"msg": absent}))
        assert observation.filter(logging.makeLogRecord({"msg": "Not enough permissions to list namespaces"}))
    finally:
        logger.setLevel(before[0])
        logger.filters[:] = before[1]
