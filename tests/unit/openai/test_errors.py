"""One place decides what an error is over HTTP."""

from __future__ import annotations

import inspect
import json

import pytest

from flowprefill import errors
from flowprefill.openai.errors import answer_for, method_not_allowed, no_such_path

STATUSES = {
    errors.InvalidRequest("x", param="p", code="c"): 400,
    errors.ContextLengthExceeded(num_prompt_tokens=10, max_tokens=5, max_model_len=12): 400,
    errors.Unauthorized("x"): 401,
    errors.NotFound("x"): 404,
    errors.BodyTooLarge("x"): 413,
    errors.QueueFull("x"): 429,
    errors.Shed("x"): 429,
    errors.EngineFailed("x"): 500,
    errors.KVTransferFailed("x"): 502,
    errors.UpstreamFailed("x"): 502,
    errors.Unavailable("x"): 503,
    errors.RequestTimeout("x"): 504,
}


@pytest.mark.parametrize(("error", "status"), STATUSES.items(), ids=lambda value: type(value).__name__)
def test_every_error_has_its_status(error: errors.FlowPrefillError, status: int) -> None:
    answer = answer_for(error)
    assert answer.status == status
    assert json.loads(answer.body())["error"]["message"] == str(error)


def test_no_error_of_the_tree_is_forgotten() -> None:
    startup_only = {errors.ModelNotLoadable, errors.InvalidConfiguration, errors.FlowPrefillError}
    tree = {
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__
    }
    assert tree - startup_only == {type(error) for error in STATUSES}


def test_an_unexpected_error_tells_nothing_of_itself() -> None:
    answer = answer_for(RuntimeError("password is hunter2"))
    assert answer.status == 500
    assert "hunter2" not in answer.body().decode()


def test_a_full_queue_says_when_to_come_back() -> None:
    assert answer_for(errors.QueueFull("x", retry_after_s=2.3)).headers["Retry-After"] == "3"
    assert answer_for(errors.Shed("x")).code == "shed"


def test_context_length_has_openais_code() -> None:
    error = errors.ContextLengthExceeded(num_prompt_tokens=10, max_tokens=5, max_model_len=12)
    assert answer_for(error).code == "context_length_exceeded"


def test_paths_and_methods_have_envelopes_too() -> None:
    assert no_such_path("/v1/embeddings").status == 404
    answer = method_not_allowed("GET", "/v1/completions", "POST")
    assert answer.status == 405
    assert answer.headers["Allow"] == "POST"
