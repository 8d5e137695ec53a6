"""Logs stay bounded and are followed across rotation."""

from __future__ import annotations

import os
from pathlib import Path

from flowprefill_operator.node.logs import BoundedLog, Follower, last_lines, prune


def test_a_log_never_takes_more_than_twice_its_size_and_keeps_the_newest(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=1000)
    for number in range(1000):
        log.write(f"line {number}\n".encode())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert last_lines(tmp_path / "a.log", 2) == ["line 998", "line 999"]


def test_last_lines_reach_back_into_the_older_half(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=20)
    for number in range(4):
        log.write(f"line {number}\n".encode())
    assert last_lines(tmp_path / "a.log", 3) == ["line 1", "line 2", "line 3"]


def test_the_newest_logs_are_kept(tmp_path: Path) -> None:
    for age_s, name in enumerate(("c", "b", "a")):
        for suffix in (".log", ".log.1"):
            path = tmp_path / f"{name}{suffix}"
            path.touch()
            os.utime(path, (1000 - age_s, 1000 - age_s))
    prune(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"c.log", "c.log.1", "b.log", "b.log.1"}


def test_no_log_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log", 3) == []


def test_a_follower_sees_every_byte_once_across_a_rotation(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=30)
    follower = Follower(log.path)
    log.write(b"before\n")
    follower.skip_to_end()
    seen = b""
    for number in range(8):
        log.write(f"line {number}\n".encode())
        seen += b"".join(follower.read())
    assert seen == b"".join(f"line {number}\n".encode() for number in range(8))
