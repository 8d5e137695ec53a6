"""Ranks come to their engine core, share its page, and nobody else gets in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from flowprefill.errors import EngineFailed
from flowprefill.server.vllm.ranks import gathering
from flowprefill.server.vllm.ranks.gathering import Meeting, join
from flowprefill.server.vllm.ranks.messages import Leave, Ready

WAIT_S = 20.0

STRANGER = """
import socket, sys
stranger = socket.socket(socket.AF_UNIX)
stranger.connect("\\0" + sys.argv[1])
print("in", flush=True)
print(len(stranger.recv(1)))
"""


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


class Rank(threading.Thread):
    """A rank of this process: comes, says that it is ready, writes to the page and waits for a message."""

    def __init__(self, address: str, *, claims: int = 0) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.claims = claims
        self.heard: object = None
        self.start()

    def run(self) -> None:
        link, page = join(self.address)
        page.row(2).passes(0, 41)
        link.send(Ready(rank=self.claims, num_slots=4, num_points={"operator": 20}))
        self.heard = next(link.received(), None)
        link.close()


def test_a_rank_that_comes_shares_the_page(meeting: Meeting) -> None:
    rank = Rank(meeting.address)
    found = meeting.gather({os.getpid(): 0}, num_slots=4)
    (ready,) = found.ready
    assert (ready.rank, ready.num_slots, ready.num_points) == (0, 4, {"operator": 20})
    assert found.page.row(2).furthest() == 41
    assert found.page.row(1).furthest() == -1, "other slots are as they were"
    found.links[0].send(Leave())
    rank.join(WAIT_S)
    assert rank.heard == Leave()
    found.links[0].close()
    found.page.close()


def test_a_process_that_the_core_did_not_start_is_turned_away(meeting: Meeting) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, meeting.address], stdout=subprocess.PIPE, text=True
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "in\n"
    rank = Rank(meeting.address)
    found = meeting.gather({os.getpid(): 0}, num_slots=4)
    said, _ = stranger.communicate(timeout=WAIT_S)
    assert said == "0\n", "it was given nothing"
    found.links[0].close()
    rank.join(WAIT_S)
    found.page.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GATHER_TIMEOUT_S", 0.05)
    meeting = Meeting()
    with pytest.raises(EngineFailed, match=r"ranks \[0, 1\] did not come"):
        meeting.gather({os.getpid(): 0, 1: 1}, num_slots=4)


def test_a_rank_that_takes_itself_for_another_is_refused(meeting: Meeting) -> None:
    rank = Rank(meeting.address, claims=3)
    with pytest.raises(EngineFailed, match=r"rank 0 began with Ready\(rank=3"):
        meeting.gather({os.getpid(): 0}, num_slots=4)
    rank.join(WAIT_S)
    assert not rank.is_alive(), "its connection was closed"
