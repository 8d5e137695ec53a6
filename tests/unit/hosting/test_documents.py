"""The configuration documents: the live one is followed, and the last good one is kept."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.documents import LiveDocument, read_pod_config
from flowprefill.hosting.watching import MAX_BYTES, WatchedFile
from flowprefill.server.settings import checked
from flowprefill_crd import LiveConfig
from support.pods import live_config, until


class Followed:
    """A live document in a mounted directory, as a ConfigMap is: files are symlinks through `..data`."""

    def __init__(self, tmp_path: Path, text: str) -> None:
        self.path = tmp_path / "live"
        self.path.mkdir()
        self.version = 0
        self.seen: list[LiveConfig] = []
        self.num_refused = 0
        self.replace(text)
        (self.path / "live.json").symlink_to("..data/live.json")
        self.document = LiveDocument(self.path, checked)
        self.document.subscribe(changed=self.seen.append, refused=self.refused)

    def replace(self, text: str) -> None:
        self.version += 1
        folder = self.path / f"..v{self.version}"
        folder.mkdir()
        (folder / "live.json").write_text(text)
        (self.path / "..next").symlink_to(folder.name)
        os.replace(self.path / "..next", self.path / "..data")

    def refused(self) -> None:
        self.num_refused += 1


def test_a_new_document_is_taken_over(tmp_path: Path) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    followed.document.take()
    assert followed.seen == []
    followed.replace(live_config(generation=2, policy="fcfs").to_json())
    followed.document.take()
    assert [live.generation for live in followed.seen] == [2]
    assert followed.document.current.policy == "fcfs"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"generation": 5, "sloClasses": []}',
        # Chunks as preemption points without a chunk size: each field is fine, together they are not.
        live_config(generation=5).to_json().replace('"operator"', '"chunk"'),
    ],
)
def test_a_bad_document_keeps_the_last_good_one(tmp_path: Path, bad: str) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    followed.replace(bad)
    followed.document.take()
    assert followed.document.current.generation == 1
    assert followed.seen == []
    assert followed.num_refused == 1
    followed.replace(live_config(generation=6).to_json())
    followed.document.take()
    assert followed.document.current.generation == 6


def test_a_document_that_disappears_keeps_the_last_good_one(tmp_path: Path) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    (followed.path / "..data").unlink()
    followed.document.take()
    assert followed.document.current.generation == 1
    assert followed.num_refused == 1


async def test_changes_are_seen_while_watching_each_once(tmp_path: Path) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    watching = asyncio.ensure_future(followed.document.watch())
    try:
        followed.replace("{")
        await until(lambda: followed.num_refused == 1)
        followed.replace(live_config(generation=2).to_json())
        await until(lambda: bool(followed.seen))
        followed.replace(live_config(generation=3).to_json())
        await until(lambda: len(followed.seen) == 2)
    finally:
        watching.cancel()
    assert [live.generation for live in followed.seen] == [2, 3]
    assert followed.num_refused == 1


def test_a_watched_file_tells_each_change_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = WatchedFile(path)
    assert not file.changed()
    for change in (lambda: path.write_text("a"), lambda: path.write_text("bc"), path.unlink):
        change()
        assert file.changed()
        assert not file.changed()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"ab\xff", "not UTF-8 text: byte 0xff at 2"),
        (b" " * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidConfiguration, match=reason) as caught:
        WatchedFile(path).read()
    assert str(path) in str(caught.value)


def test_a_bad_document_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_text("{}")
    with pytest.raises(InvalidConfiguration, match=r"live\.json"):
        LiveDocument(tmp_path, checked)
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        read_pod_config(tmp_path / "nothing.json")
