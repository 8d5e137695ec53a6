"""Every error this package raises on purpose, in one tree.

A message says what was wrong, the value seen and what is accepted. Each leaf becomes an HTTP
status in exactly one place, `flowprefill.openai.errors`.
"""

from __future__ import annotations


class FlowPrefillError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequest(FlowPrefillError):
    """The client's request cannot be served as written (HTTP 400).

    `param` names the offending field and `code` is a machine-readable reason, both as in
    OpenAI's error envelope.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested tokens do not fit the model (HTTP 400, `context_length_exceeded`)."""

    def __init__(self, *, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} tokens and {max_tokens} more were requested; "
            f"shorten the prompt or lower max_tokens",
            param="messages",
            code="context_length_exceeded",
        )


class Unauthorized(FlowPrefillError):
    """No valid API key came with the request (HTTP 401)."""


class NotFound(FlowPrefillError):
    """The named model or path is not served here (HTTP 404)."""


class BodyTooLarge(FlowPrefillError):
    """The request body exceeds the configured limit (HTTP 413)."""


class QueueFull(FlowPrefillError):
    """A bounded queue has no room (HTTP 429 with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Shed(QueueFull):
    """The request could not meet its TTFT target and its class asks to be told at once (HTTP 429)."""


class Unavailable(FlowPrefillError):
    """No pod can take the request now (HTTP 503)."""


class UpstreamFailed(FlowPrefillError):
    """A pod failed while it held the request (HTTP 502)."""


class RequestTimeout(FlowPrefillError):
    """The request ran past its time limit (HTTP 504)."""


class EngineFailed(FlowPrefillError):
    """The engine raised while it ran a batch; the batch's requests fail, the pool goes on (HTTP 500)."""


class KVTransferFailed(FlowPrefillError):
    """KV blocks could not be pulled from the prefill pod (HTTP 502); never a silent recompute."""


class ModelNotLoadable(FlowPrefillError):
    """The model's files are missing, damaged or of an unsupported kind (start-up error)."""


class InvalidConfiguration(FlowPrefillError):
    """A configuration document cannot be used (start-up error)."""


def reason_of(error: BaseException) -> str:
    """The error's kind and words, for people."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
