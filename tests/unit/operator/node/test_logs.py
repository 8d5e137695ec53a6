"""Logs stay bounded and are followed across rotation."""

from __future__ import annotations

from pathlib import Path

from flowprefill_operator.node.logs import BoundedLog, Follower, last_lines


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
