"""The contract of discovery, kept by a file and by an API server (here a fake; `tests/cluster` has the real one)."""

from support.discovery_contract import (
    test_a_source_that_is_away_leaves_the_last_endpoints_and_tells_later_changes,
    test_a_watch_begins_while_the_source_is_away,
    test_pods_that_come_change_and_go_are_reported,
    test_the_first_report_comes_without_any_pod,
    test_the_first_report_is_what_is_known_already,
)

__all__ = [
    "test_a_source_that_is_away_leaves_the_last_endpoints_and_tells_later_changes",
    "test_a_watch_begins_while_the_source_is_away",
    "test_pods_that_come_change_and_go_are_reported",
    "test_the_first_report_comes_without_any_pod",
    "test_the_first_report_is_what_is_known_already",
]
