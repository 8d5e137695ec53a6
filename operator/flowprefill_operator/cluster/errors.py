"""What an API server says no with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


class ClusterError(Exception):
    """A request that did not succeed. `verb` and `resource` are as RBAC names them; `status` is the HTTP status, 0 when
    there was no answer."""

    def __init__(self, *, verb: str, resource: str, status: int, reason: str, message: str) -> None:
        self.verb = verb
        self.resource = resource
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{verb} {resource}: {message}")


class Forbidden(ClusterError):
    """403 for want of permission."""


class Refused(ClusterError):
    """403 although RBAC allows it, or an admission's no: a quota, pod security, a webhook, a namespace that goes away."""


class NotFound(ClusterError):
    """404: no such object, or no such API."""


class Conflict(ClusterError):
    """409: another manager owns a field, or the object changed or exists."""


class Invalid(ClusterError):
    """400 or 422: the object itself is not acceptable."""


class Unavailable(ClusterError):
    """No answer, 429 or 5xx: worth another try later."""


def answer_error(verb: str, resource: str, status: int, body: bytes) -> ClusterError:
    """The error in an answer that is not 2xx."""
    said = _status_object(body)
    reason = str(said.get("reason") or "")
    message = str(said.get("message") or body[:300].decode(errors="replace") or f"HTTP {status}")
    return _type(status, reason, message)(
        verb=verb, resource=resource, status=status, reason=reason, message=message
    )


def no_answer(verb: str, resource: str, error: BaseException) -> Unavailable:
    """The error of a request that was not answered."""
    message = str(error) or type(error).__name__
    return Unavailable(verb=verb, resource=resource, status=0, reason="Unreachable", message=message)


_RIGHTS = re.compile(
    r'forbidden: (User "|user ".* is attempting to grant RBAC permissions|cannot set (blockOwnerDeletion|an ownerRef))'
)
"""How RBAC, its check against escalation and the one of owner references begin. Admission answers 403 in other words."""


def _type(status: int, reason: str, message: str) -> type[ClusterError]:
    match status:
        case 401:
            return Forbidden
        case 403:
            return Forbidden if _RIGHTS.search(message) else Refused
        case 404 | 405:
            return NotFound
        case 409:
            return Conflict
        case 400 | 415 | 422:
            return Invalid
        case 500 if "failed to create typed patch object" in message:
            return Invalid  # how server-side apply answers a field of a wrong type
        case _:
            return Unavailable


def _status_object(body: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
