"""When a pass is repeated that could not bring everything about."""

from __future__ import annotations

from flowprefill_operator.apply import Failure, NameConflict
from flowprefill_operator.cluster.errors import ClusterError, no_answer
from flowprefill_operator.controller.retry import Retry, next_retry
from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS
from support.cluster_objects import refused

INVALID = refused(422, "Invalid", "spec.replicas: must not be negative")


def failure(error: ClusterError = INVALID, *, name: str = "example-proxy") -> Failure:
    return Failure(kind=DEPLOYMENTS, name=name, error=error)


def after(known: Retry | None, now_s: float, *failures: Failure, generation: int = 1) -> Retry:
    found = next_retry(known, generation=generation, failures=failures, now_s=now_s)
    assert found is not None
    return found


def pauses(*failures: Failure, tries: int) -> list[float]:
    """Pauses while every pass takes place when it is due and ends alike."""
    found: list[float] = []
    known, now_s = None, 100.0
    for _ in range(tries):
        known = after(known, now_s, *failures)
        found.append(known.due_s - now_s)
        now_s = known.due_s
    return found


def test_what_is_refused_for_good_is_tried_again_after_growing_pauses_up_to_a_minute() -> None:
    assert pauses(failure(), tries=6) == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    taken = NameConflict(verb="patch", resource="configmaps", status=409, reason="NameConflict", message="")
    assert pauses(failure(), failure(taken, name="example-live"), tries=3) == [5.0, 10.0, 20.0]


def test_what_heals_by_itself_is_tried_again_soon_each_time() -> None:
    away = failure(no_answer("patch", "deployments.apps", TimeoutError()))
    going = failure(
        NameConflict(verb="patch", resource="deployments", status=409, reason="BeingDeleted", message="")
    )
    for found in (away, going):
        assert pauses(found, tries=3) == [5.0, 5.0, 5.0]
    assert pauses(failure(name="example-prefill"), away, tries=3) == [5.0, 5.0, 5.0]


def test_a_pass_that_an_event_brings_does_not_move_the_next_try() -> None:
    first = after(None, 100.0, failure())
    assert first.due_s == 105.0
    second = after(first, 105.0, failure())
    for now_s in (105.3, 107.0, 114.9):
        second = after(second, now_s, failure())
        assert second.due_s == 115.0
    assert after(second, 115.0, failure()).due_s == 135.0


def test_another_spec_another_failure_or_a_pass_that_succeeds_begins_anew() -> None:
    known = after(after(after(None, 100.0, failure()), 105.0, failure()), 115.0, failure())
    assert known.pause_s == 20.0
    assert after(known, 135.0, failure(), generation=2).pause_s == 5.0
    assert after(known, 135.0, failure(), failure(name="example-prefill")).pause_s == 5.0
    assert after(known, 135.0, failure(refused(403, "Forbidden", "exceeded quota: small"))).pause_s == 5.0
    assert next_retry(known, generation=1, failures=(), now_s=135.0) is None


def test_a_failure_is_news_once_whatever_the_words() -> None:
    first = after(None, 100.0, failure())
    assert [found.name for found in first.news] == ["example-proxy"]
    reworded = failure(refused(422, "Invalid", "spec.replicas: must not be negative (request 4711)"))
    assert after(first, 105.0, reworded).news == ()
    other = Failure(kind=CONFIG_MAPS, name="example-proxy", error=INVALID)
    assert after(first, 105.0, failure(), other).news == (other,)
    assert after(first, 105.0, failure(), generation=2).news == (failure(),)
