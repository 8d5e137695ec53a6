"""The folder of a service: locks, atomic files, the contract with discovery."""

from __future__ import annotations

import os
from pathlib import Path

from flowprefill_operator.node.backoff import Backoff
from flowprefill_operator.node.state import StateDir, find, write_folder


def test_a_lock_is_held_once_and_shows_that_the_service_runs(tmp_path: Path) -> None:
    state = StateDir(tmp_path, namespace="default", name="a").create()
    assert not state.is_running()
    with state.lock("supervisor", wait_s=0) as mine:
        assert mine is not None
        assert state.is_running()
        with state.lock("supervisor", wait_s=0) as second:
            assert second is None
    assert not state.is_running()


def test_a_copy_of_the_descriptor_keeps_the_lock_after_its_first_holder(tmp_path: Path) -> None:
    state = StateDir(tmp_path, namespace="default", name="a").create()
    with state.lock("processes", wait_s=0) as mine:
        assert mine is not None
        copy = os.dup(mine)
    assert not state.is_empty()
    os.close(copy)
    assert state.is_empty()


def test_a_folder_gets_exactly_the_files_and_unchanged_ones_are_not_touched(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": "1", "b": "2"})
    before = (tmp_path / "a").stat()
    write_folder(tmp_path, {"a": "1", "c": "3"})
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c"}
    after = (tmp_path / "a").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_services_of_one_name_in_two_namespaces_are_apart(tmp_path: Path) -> None:
    for namespace in ("a", "b"):
        StateDir(tmp_path, namespace=namespace, name="chat").create().service.touch()
    assert [(state.namespace, state.name) for state in find(tmp_path)] == [("a", "chat"), ("b", "chat")]


def test_the_first_restart_is_at_once_and_later_ones_wait_twice_as_long_up_to_a_minute() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(n) for n in range(1, 10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.delay_s(10_000) == 60
