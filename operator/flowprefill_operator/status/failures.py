"""An API server's refusal as a verdict."""

from __future__ import annotations

import re

from flowprefill_operator.apply import Failure, NameConflict
from flowprefill_operator.cluster.errors import Conflict, Forbidden, Invalid, Refused
from flowprefill_operator.kinds import CLAIMS
from flowprefill_operator.status.verdict import Verdict, pending, stalled


def of_failure(failure: Failure) -> Verdict:
    """Why an object is not as wanted. Permissions, names, quotas and admission need somebody; the rest is tried again."""
    error, what = failure.error, f"{failure.kind.kind} {failure.name}"
    match error:
        case NameConflict():
            return (pending if error.reason == "BeingDeleted" else stalled)(
                error.reason, f"{what}: {error.message}"
            )
        case Forbidden():
            return stalled(
                "Forbidden", f"the operator may not {error.verb} {error.resource}: {error.message}"
            )
        case Refused():
            return stalled(refusal_reason(error.message), f"{what}{_advice(failure)}: {error.message}")
        case Invalid():
            return stalled("InvalidObject", f"{what}{_advice(failure)}: {error.message}")
        case Conflict():
            return pending("Conflict", f"{what}: {error.message}")
        case _:
            return pending("APIUnavailable", f"{what}: {error.message}")


_UNCHANGEABLE = re.compile("immutable|can not be less than|must support resize")
"""How an API server answers a claim that is to become another."""


def _advice(failure: Failure) -> str:
    """What to do about a claim that is there and that cannot become what the spec says."""
    if failure.kind == CLAIMS and _UNCHANGEABLE.search(failure.error.message):
        return " cannot become what the spec says; put spec.model.cache.persistentVolumeClaim back as it was"
    return ""


def refusal_reason(message: str) -> str:
    """One word for an admission's no."""
    if "exceeded quota" in message or "failed quota" in message:
        return "QuotaExceeded"
    if "violates PodSecurity" in message:
        return "PodSecurityViolation"
    if "being terminated" in message:
        return "NamespaceTerminating"
    return "AdmissionDenied"
