"""What an API server refuses, in words that say what to do."""

from __future__ import annotations

import pytest

from flowprefill_operator.apply import Failure
from flowprefill_operator.kinds import CLAIMS, DEPLOYMENTS, Kind
from flowprefill_operator.status.failures import of_failure
from support.cluster_objects import refused

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
