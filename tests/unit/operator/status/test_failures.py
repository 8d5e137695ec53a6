"""What an API server refuses, in words that say what to do."""

from __future__ import annotations

import pytest

from flowprefill_operator.apply import Applied, Failure, NameConflict
from flowprefill_operator.cluster.errors import ClusterError, no_answer
from flowprefill_operator.kinds import CLAIMS, CONFIG_MAPS, DEPLOYMENTS, Kind
from flowprefill_operator.status.failures import of_failure
from support.cluster_objects import (
    quota_error,
    rbac_error,
    refused,
)
from support.conditions import conditions, serving, starting, told, view

# As Kubernetes 1.37 answers (pkg/apis/core/validation, plugin/pkg/admission/storage/persistentvolume/resize).
IMMUTABLE = (
    'PersistentVolumeClaim "example-model-cache" is invalid: spec: Forbidden: spec is immutable after creation except '
    "resources.requests and volumeAttributesClassName for bound claims\n@@ -1,6 +1,7 @@\n {\n"
)
SMALLER = (
    'PersistentVolumeClaim "example-model-cache" is invalid: spec.resources.requests.storage: Forbidden: '
    "field can not be less than status.capacity"
)
LARGER = (
    'persistentvolumeclaims "example-model-cache" is forbidden: only dynamically provisioned pvc can be resized and the '
    "storageclass that provisions the pvc must support resize"
)
ADVICE = (
    "PersistentVolumeClaim example-model-cache cannot become what the spec says; "
    "put spec.model.cache.persistentVolumeClaim back as it was: "
)


def said(status: int, message: str, *, kind: Kind = CLAIMS) -> tuple[str, str]:
    reason = {403: "Forbidden", 422: "Invalid"}[status]
    error = refused(status, reason, message, resource=kind.resource)
    verdict = of_failure(Failure(kind=kind, name="example-model-cache", error=error))
    return verdict.reason, verdict.message


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (422, IMMUTABLE, "InvalidObject"),
        (422, SMALLER, "InvalidObject"),
        (403, LARGER, "AdmissionDenied"),
    ],
)
def test_a_claim_that_cannot_become_what_the_spec_says_is_to_be_put_back(
    status: int, message: str, reason: str
) -> None:
    assert said(status, message) == (reason, ADVICE + message)


def test_other_refusals_of_a_claim_and_of_other_kinds_have_no_such_advice() -> None:
    wrong = 'PersistentVolumeClaim "x" is invalid: spec.storageClassName: Invalid value: "A"'
    assert "put" not in said(422, wrong)[1]
    assert "put" not in said(403, 'persistentvolumeclaims "x" is forbidden: exceeded quota: small')[1]
    assert "put" not in said(422, "spec.selector: field is immutable", kind=DEPLOYMENTS)[1]


def failing(error: ClusterError, kind: Kind = CONFIG_MAPS, name: str = "example-live") -> Applied:
    return Applied(writes=0, failures=(Failure(kind=kind, name=name, error=error),))


CONFLICT = NameConflict(
    verb="patch",
    resource="configmaps",
    status=409,
    reason="NameConflict",
    message='"example-live" exists already and does not belong to this service',
)
GOING = NameConflict(
    verb="patch", resource="configmaps", status=409, reason="BeingDeleted", message="of an earlier owner"
)
FAILURES: dict[str, tuple[ClusterError, str, str]] = {
    "a right is missing": (rbac_error("patch", "configmaps"), "Forbidden", "Failed"),
    "a quota": (quota_error("x"), "QuotaExceeded", "Failed"),
    "the namespace goes away": (
        refused(
            403, "Forbidden", "unable to create new content in namespace ns because it is being terminated"
        ),
        "NamespaceTerminating",
        "Failed",
    ),
    "a webhook": (
        refused(403, "Forbidden", 'admission webhook "policy.example" denied the request: no'),
        "AdmissionDenied",
        "Failed",
    ),
    "the object is not acceptable": (
        refused(422, "Invalid", 'Deployment.apps "x" is invalid: spec.template: Required value'),
        "InvalidObject",
        "Failed",
    ),
    "the name is taken": (CONFLICT, "NameConflict", "Failed"),
    "the name is becoming free": (GOING, "BeingDeleted", "InProgress"),
    "somebody wrote at the same time": (
        refused(409, "Conflict", "the object changed"),
        "Conflict",
        "InProgress",
    ),
    "too many requests": (refused(429, "TooManyRequests", "slow down"), "APIUnavailable", "InProgress"),
    "an internal error": (
        refused(500, "InternalError", "etcdserver: timeout"),
        "APIUnavailable",
        "InProgress",
    ),
    "no answer": (no_answer("patch", "configmaps", TimeoutError()), "APIUnavailable", "InProgress"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_why_an_object_is_not_as_planned_is_told(case: str) -> None:
    error, reason, progress = FAILURES[case]
    cluster, _ = serving()
    shown = view(cluster, applied=failing(error))
    assert told(shown, "ObjectsApplied") == ("False", reason, progress)
    assert told(shown) == ("False", reason, progress)
    assert error.message in conditions(shown)["ObjectsApplied"].message
    assert conditions(shown)["Available"].status == "True"


def test_a_missing_right_is_named_by_verb_and_resource() -> None:
    cluster, _ = serving()
    message = conditions(view(cluster, applied=failing(rbac_error("patch", "deployments.apps"))))[
        "Ready"
    ].message
    assert "may not patch deployments.apps" in message


def test_further_failures_are_named() -> None:
    cluster, _ = serving()
    first, second = failing(quota_error("x")).failures[0], failing(CONFLICT).failures[0]
    shown = view(cluster, applied=Applied(writes=0, failures=(first, second, second)))
    what = f"{second.kind.kind} {second.name}"
    assert conditions(shown)["ObjectsApplied"].message.endswith(f"; also {what}, {what}")


def test_a_deployment_that_cannot_be_applied_is_told_by_its_role() -> None:
    cluster, revision = starting()
    failure = failing(rbac_error("patch", "deployments.apps"), DEPLOYMENTS, f"example-decode-{revision}")
    shown = view(cluster, applied=failure)
    assert told(shown, "DecodeReady")[1] == "Forbidden"
    assert told(shown, "PrefillReady")[1] != "Forbidden"
