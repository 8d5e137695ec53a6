"""Which transitions are told by Events, and how."""

from __future__ import annotations

import pytest

from flowprefill_crd import Status, parse_service
from flowprefill_crd.v1alpha1 import Condition
from flowprefill_operator.controller.events import event, tell, transitions
from flowprefill_operator.resources.base import Object
from support.cluster_objects import rbac_error
from support.services import document

SERVICE = parse_service(document(namespace="ns", uid="u"))


def status(**conditions: str) -> Status:
    """Conditions by type: `True`, `False` or `Unknown`, with a reason behind a colon."""
    return Status(
        conditions=tuple(
            Condition(
                type=name,
                status=text.partition(":")[0],
                reason=text.partition(":")[2] or "Because",
                message="why",
                last_transition_time="2026-03-01T12:00:00Z",
            )
            for name, text in conditions.items()
        )
    )


def names(before: Status | None, after: Status) -> list[str]:
    return [condition.type for condition in transitions(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, status(Ready="False", Available="False"), []),
        (None, status(Ready="True", Available="True"), ["Ready", "Available"]),
        (status(Ready="False"), status(Ready="True"), ["Ready"]),
        (status(Ready="True"), status(Ready="False"), ["Ready"]),
        (status(Ready="True"), status(Ready="Unknown"), ["Ready"]),
        (status(Ready="Unknown"), status(Ready="False"), []),
        (status(Ready="False:One"), status(Ready="False:Two"), []),
        (status(Available="True"), status(Available="True"), []),
        (status(PrefillReady="True"), status(PrefillReady="False"), []),
        (status(), status(Stalled="True:ImagePullFailed"), ["Stalled"]),
        (status(Stalled="True:ImagePullFailed"), status(Stalled="True:ImagePullFailed"), []),
        (status(Stalled="True:ImagePullFailed"), status(Stalled="True:CrashLoop"), ["Stalled"]),
        (status(Stalled="True:ImagePullFailed"), status(), []),
    ],
)
def test_events_are_for_transitions_that_somebody_looks_for(
    before: Status | None, after: Status, told: list[str]
) -> None:
    assert names(before, after) == told


@pytest.mark.parametrize(
    ("told", "reason", "kind"),
    [
        (status(Ready="True:Serving"), "Ready", "Normal"),
        (status(Ready="False:CrashLoop"), "NotReady", "Warning"),
        (status(Ready="Unknown:Paused"), "NotReady", "Normal"),
        (status(Available="False:ScaledToZero"), "NotAvailable", "Normal"),
        (status(Available="True:Serving"), "Available", "Normal"),
        (status(Available="False:NoProxy"), "NotAvailable", "Warning"),
        (status(Stalled="True:ImagePullFailed"), "ImagePullFailed", "Warning"),
    ],
)
def test_an_event_names_what_happened_and_what_it_is_about(told: Status, reason: str, kind: str) -> None:
    found = event(SERVICE, told.conditions[0], instance="pod-1")
    assert (found["reason"], found["type"]) == (reason, kind)
    assert found["note"] == f"{told.conditions[0].reason}: why"
    assert found["regarding"] == {
        "apiVersion": "flowprefill.io/v1alpha1",
        "kind": "FlowPrefillService",
        "name": "example",
        "namespace": "ns",
        "uid": "u",
    }
    assert (found["reportingController"], found["reportingInstance"]) == ("flowprefill.io/operator", "pod-1")


def test_an_event_fits_what_the_api_allows() -> None:
    """events.k8s.io/v1: a note of at most 1 KiB, a name that is a DNS subdomain, a time in microseconds."""
    condition = status(Ready="False").conditions[0].model_copy(update={"message": "x" * 4096})
    service = parse_service(document(namespace="ns", uid="u") | {"metadata": {"name": "a." * 100 + "b"}})
    found = event(service, condition, instance="i")
    note, meta, when = found["note"], found["metadata"], found["eventTime"]
    assert isinstance(note, str)
    assert isinstance(meta, dict)
    assert isinstance(when, str)
    assert len(note.encode()) <= 1024
    assert len(meta["generateName"]) <= 248
    assert when.endswith("Z")
    assert len(when.partition(".")[2]) == len("123456Z")


class Broken:
    """An API server that takes no Events."""

    async def create(self, item: Object) -> None:
        raise rbac_error("create", "events.events.k8s.io")


class Silent:
    """An API server that takes every Event."""

    async def create(self, item: Object) -> None:
        del item


@pytest.mark.parametrize(
    ("told", "level"),
    [
        (status(Ready="True:Serving"), "INFO"),
        (status(Ready="Unknown:Paused"), "INFO"),
        (status(Stalled="True:InvalidPodTemplate"), "WARNING"),
    ],
)
async def test_a_transition_is_logged_with_its_reason(
    told: Status, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await tell(Silent(), SERVICE, list(told.conditions), "i")  # type: ignore[arg-type]
    (record,) = caplog.records
    assert (record.levelname, record.message) == (level, "condition changed")
    said = vars(record)
    assert said["service"] == "ns/example"
    assert said["reason"] == told.conditions[0].reason


async def test_an_event_that_cannot_be_written_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    await tell(Broken(), SERVICE, list(status(Ready="True").conditions), "i")  # type: ignore[arg-type]
    assert "event not written" in caplog.text
