from __future__ import annotations

import pytest

from flowprefill.bench.report import RequestRecord, attainment, goodput_per_s, summarise


def record(
    slo_class: str = "chat", *, ttft_s: float | None, at_s: float = 0.0, slo_s: float = 1.0
) -> RequestRecord:
    return RequestRecord(
        request_id=f"{slo_class}-{at_s}",
        slo_class=slo_class,
        at_s=at_s,
        num_prompt_tokens=100,
        num_cached_tokens=0,
        num_output_tokens=4,
        ttft_slo_s=slo_s,
        ttft_s=ttft_s,
        end_s=at_s + 2.0,
        error=None if ttft_s is not None else "HTTP 503",
    )


def test_the_wilson_interval_of_9_in_10_is_the_textbook_one() -> None:
    # Wilson 1927 by hand: p=.9, n=10, z=1.95996 gives (0.5958, 0.9821).
    result = attainment([record(ttft_s=0.5)] * 9 + [record(ttft_s=2.0)])
    assert (result.met, result.total, result.ratio) == (9, 10, 0.9)
    assert result.low == pytest.approx(0.5958, abs=5e-4)
    assert result.high == pytest.approx(0.9821, abs=5e-4)


def test_a_request_that_got_no_token_is_a_miss_and_counts() -> None:
    result = attainment([record(ttft_s=0.5), record(ttft_s=None)])
    assert (result.met, result.total) == (1, 2)


def test_a_first_token_exactly_on_time_is_met() -> None:
    assert record(ttft_s=1.0).met
    assert not record(ttft_s=1.0000001).met


def test_attainment_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        attainment([])


def test_classes_are_summarised_apart_the_tightest_target_first() -> None:
    chat, document = summarise(
        [record("document", ttft_s=3.0, slo_s=5.0), record("chat", ttft_s=0.2), record("chat", ttft_s=0.4)]
    )
    assert (chat.slo_class, chat.attainment.total, chat.ttft_p50_s) == ("chat", 2, pytest.approx(0.3))
    assert (document.slo_class, document.ttft_slo_s, document.attainment.ratio) == ("document", 5.0, 1.0)


def test_goodput_counts_only_requests_in_time() -> None:
    # Two of three in time, first sent at 0, last ended at 4 + 2 = 6 s.
    records = [record(ttft_s=0.5), record(ttft_s=3.0, at_s=1.0), record(ttft_s=0.5, at_s=4.0)]
    assert goodput_per_s(records) == pytest.approx(2 / 6)
