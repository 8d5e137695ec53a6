"""Errors become HTTP answers here and nowhere else: status, OpenAI's envelope, headers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowprefill.errors import (
    BodyTooLarge,
    EngineFailed,
    FlowPrefillError,
    InvalidRequest,
    KVTransferFailed,
    NotFound,
    QueueFull,
    RequestTimeout,
    Shed,
    Unauthorized,
    Unavailable,
    UpstreamFailed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """One HTTP error answer. `type` is OpenAI's error family, `code` a machine-readable reason."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, object]:
        """`{"error": {message, type, param, code}}`, as OpenAI answers."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return json.dumps(self.envelope(), separators=(",", ":")).encode()


def answer_for(error: BaseException) -> ErrorAnswer:
    """The answer to a request that ended in `error`.

    An error that is not of our tree answers 500 with a constant message: its text may hold what a client
    must not see. The caller logs it with its traceback.
    """
    match error:
        case InvalidRequest():
            return ErrorAnswer(
                status=400,
                message=str(error),
                type="invalid_request_error",
                param=error.param,
                code=error.code,
            )
        case Unauthorized():
            return ErrorAnswer(
                status=401,
                message=str(error),
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        case NotFound():
            return ErrorAnswer(
                status=404,
                message=str(error),
                type="invalid_request_error",
                param="model",
                code="model_not_found",
            )
        case BodyTooLarge():
            return ErrorAnswer(
                status=413, message=str(error), type="invalid_request_error", code="body_too_large"
            )
        case QueueFull():
            return ErrorAnswer(
                status=429,
                message=str(error),
                type="rate_limit_error",
                code="shed" if isinstance(error, Shed) else "queue_full",
                headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
            )
        case KVTransferFailed():
            return ErrorAnswer(
                status=502, message=str(error), type="upstream_error", code="kv_transfer_failed"
            )
        case UpstreamFailed():
            return ErrorAnswer(status=502, message=str(error), type="upstream_error", code="upstream_failed")
        case Unavailable():
            return ErrorAnswer(
                status=503,
                message=str(error),
                type="service_unavailable_error",
                code="unavailable",
                headers={"Retry-After": "1"},
            )
        case RequestTimeout():
            return ErrorAnswer(status=504, message=str(error), type="timeout_error", code="timeout")
        case EngineFailed():
            return ErrorAnswer(status=500, message=str(error), type="server_error", code="engine_failed")
        case FlowPrefillError():
            return ErrorAnswer(status=500, message=str(error), type="server_error", code="internal_error")
        case _:
            return ErrorAnswer(
                status=500,
                message="an internal error ended this request; its id is in the x-request-id header",
                type="server_error",
                code="internal_error",
            )


def no_such_path(path: str) -> ErrorAnswer:
    """404 for a path that is not served."""
    return ErrorAnswer(
        status=404,
        message=f"no such path: {path[:200]}; served are /v1/completions, /v1/chat/completions and /v1/models",
        type="invalid_request_error",
        code="not_found",
    )


def method_not_allowed(method: str, path: str, allowed: str) -> ErrorAnswer:
    """405 for a served path; `allowed` is the value of the Allow header."""
    return ErrorAnswer(
        status=405,
        message=f"method {method[:20]} is not allowed for {path[:200]}; accepted are {allowed}",
        type="invalid_request_error",
        code="method_not_allowed",
        headers={"Allow": allowed},
    )
