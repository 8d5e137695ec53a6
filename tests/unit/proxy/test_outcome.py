from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.metrics.proxy import ProxyMetrics
from flowprefill.proxy.attainment import Attainment
from flowprefill.proxy.exchange import Timing
from flowprefill.proxy.outcome import CLIENT_LEFT, Account, Ended, account
from flowprefill.proxy.record import Ledger, Record
from flowprefill.proxy.slo import Slo, SloClass

TARGET_S = 2.0


@pytest.mark.parametrize(
    ("status", "after_s", "ttft_s", "broken", "outcome", "result"),
    [
        (200, 9.0, 1.9, False, "ok", "met"),
        (200, 9.0, 2.0, False, "ok", "met"),
        (200, 9.0, 2.1, False, "ok", "missed"),
        (200, 9.0, 0.5, True, "error", "missed"),
        (400, 0.1, None, False, "error", None),
        (401, 0.1, None, False, "error", None),
        (404, 0.1, None, False, "error", None),
        (413, 0.1, None, False, "error", None),
        (429, 0.1, None, False, "shed", "missed"),
        (500, 0.1, None, False, "error", "missed"),
        (502, 0.1, None, False, "error", "missed"),
        (503, 0.1, None, False, "error", "missed"),
        (504, 9.9, None, False, "error", "missed"),
        (CLIENT_LEFT, 1.0, None, False, "cancelled", None),
        (CLIENT_LEFT, 2.0, None, False, "cancelled", None),
        (CLIENT_LEFT, 2.1, None, False, "cancelled", "missed"),
        (CLIENT_LEFT, 9.0, 1.0, False, "cancelled", "met"),
        (CLIENT_LEFT, 9.0, 3.0, False, "cancelled", "missed"),
    ],
)
def test_each_end_counts_as_the_table_says(status, after_s, ttft_s, broken, outcome, result):
    ended = Ended(status=status, target_s=TARGET_S, after_s=after_s, ttft_s=ttft_s, broken=broken)
    assert account(ended) == Account(outcome=outcome, result=result)


SLO = Slo(slo_class=SloClass(name="chat", ttft_s=2.0, min_ttft_s=1.0, max_ttft_s=4.0), ttft_s=TARGET_S)
ends = st.tuples(
    st.sampled_from([None, 200, 400, 404, 413, 429, 500, 502, 503, 504]),
    st.floats(0.0, 10.0),
    st.none() | st.floats(0.0, 10.0),
    st.booleans(),
)


@given(st.lists(ends, max_size=30))
def test_met_and_missed_add_up_to_the_slo_events_and_every_request_counts_once(all_ends):
    metrics = ProxyMetrics(service="s", model_name="m")
    metrics.slo.configure([("chat", 2.0, 0.9)])
    attainment = Attainment()
    ledger = Ledger(metrics=metrics, attainment=attainment)
    expected = 0
    for status, after_s, ttft_s, broken in all_ends:
        record = Record(request_id="r", api="chat", arrival_s=0.0, slo=SLO, status=status, broken=broken)
        if status == 200:
            ttft_s = after_s if ttft_s is None else min(ttft_s, after_s)
        if ttft_s is not None and status in (None, 200):
            record.first_token(Timing(arrival_s=0.0, dispatched_s=0.0, first_token_s=ttft_s), ttft_s)
        ledger.close(record, after_s)
        left_early = status is None and record.ttft_s is None and after_s <= TARGET_S
        expected += not (left_early or status in (400, 404, 413))
    samples = [s for family in metrics.registry.collect() for s in family.samples]
    events = sum(s.value for s in samples if s.name == "flowprefill_ttft_slo_requests_total")
    requests = sum(s.value for s in samples if s.name == "flowprefill_requests_total")
    counted = attainment.report(["chat"], 10.0)["chat"]
    assert events == expected
    assert counted["met"] + counted["missed"] == expected
    assert requests == len(all_ends)


def test_windows_forget_what_is_older_than_they_are_long():
    attainment = Attainment()
    attainment.count("chat", "missed", 0.0)
    attainment.count("chat", "met", 1000.0)
    report = attainment.report(["chat", "batch"], 1005.0)
    assert report["chat"] == {
        "met": 1,
        "missed": 1,
        "windows": {"5m": {"met": 1, "missed": 0}, "1h": {"met": 1, "missed": 1}},
    }
    assert report["batch"]["met"] == 0
    assert attainment.report(["chat"], 10_000.0)["chat"]["windows"]["1h"] == {"met": 0, "missed": 0}


@given(st.lists(st.floats(0.0, 1e5), max_size=400))
def test_windows_count_as_a_scan_over_all_events_does(times):
    attainment = Attainment()
    times.sort()
    for at_s in times:
        attainment.count("chat", "met", at_s)
    now_s = times[-1] if times else 0.0
    windows = attainment.report(["chat"], now_s)["chat"]["windows"]
    for label, length_s in (("5m", 300.0), ("1h", 3600.0)):
        # a bucket of 10 s counts as a whole while any of it lies inside the window
        expected = sum((at_s - at_s % 10.0) + 10.0 > now_s - length_s for at_s in times)
        assert windows[label]["met"] == expected
