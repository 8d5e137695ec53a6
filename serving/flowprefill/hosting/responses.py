"""Errors as HTTP responses, in OpenAI's envelope."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from flowprefill.openai.errors import ErrorAnswer, method_not_allowed, no_such_path


def error_response(answer: ErrorAnswer) -> Response:
    """An error as a response."""
    return Response(
        answer.body(), status_code=answer.status, headers=dict(answer.headers), media_type="application/json"
    )


async def not_served(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "POST")
        return error_response(method_not_allowed(request.method, path, allowed))
    return error_response(no_such_path(path))
