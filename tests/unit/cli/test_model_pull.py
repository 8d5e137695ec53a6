"""`flowprefill model pull` as an init container runs it, against a hub whose branch moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.small_hub import INDEX, SHARDED, SHARDS, SmallHub, commit_of, small_hub

FIRST, SECOND = commit_of(1), commit_of(2)


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with small_hub() as found:
        yield found


class Pod:
    """One pod's view of the world: its own scratch folder, a cache that it shares, and its environment."""

    def __init__(self, hub: SmallHub, folder: Path, cache: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.termination_log = folder / "termination-log"
        self.termination_log.touch()
        self.pin = folder / "model-commit.json"
        self.options: list[str] = []
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FLOWP"))
        }
        self.environment = inherited | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "XDG_CACHE_HOME": str(cache),
            "FLOWPREFILL_MODEL_PIN": str(self.pin),
        }

    def pull(self, revision: str = "main", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the init container's command."""
        command = [sys.executable, "-m", "flowprefill.cli", "model", "pull", "hf://org/name"]
        return subprocess.run(
            [*command, "--revision", revision, "--termination-log", str(self.termination_log), *self.options],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def told(self) -> object:
        return json.loads(self.termination_log.read_text())


def test_the_branch_is_asked_for_once_and_a_pod_that_is_told_the_commit_fetches_that_whatever_it_says_now(
    hub: SmallHub, tmp_path: Path
) -> None:
    first = Pod(hub, tmp_path / "first", tmp_path / "cache-1")
    done = first.pull()
    assert done.returncode == 0, done.stderr
    assert first.termination_log.read_text() == f'{{"commit":"{FIRST}"}}'
    assert hub.questions == ["main"]

    hub.branches["main"] = SECOND
    later = Pod(hub, tmp_path / "later", tmp_path / "cache-2")
    done = later.pull(FLOWPREFILL_MODEL_COMMIT=FIRST)
    assert done.returncode == 0, done.stderr
    assert later.told == {"commit": FIRST}
    assert {commit for commit, _ in hub.downloads} == {FIRST}
    assert "main" not in hub.questions[1:]


@pytest.mark.parametrize("by", ["--pin", "FLOWPREFILL_MODEL_PIN"])
def test_an_init_container_that_runs_again_in_the_same_pod_fetches_what_the_pod_has(
    hub: SmallHub, tmp_path: Path, by: str
) -> None:
    pod = Pod(hub, tmp_path / "pod", tmp_path / "cache")
    if by == "--pin":
        pod.options = ["--pin", pod.environment.pop("FLOWPREFILL_MODEL_PIN")]
    assert pod.pull().returncode == 0
    hub.branches["main"] = SECOND
    assert pod.pull().returncode == 0
    assert pod.told == {"commit": FIRST}
    # The service has settled on another one meanwhile.
    assert pod.pull(FLOWPREFILL_MODEL_COMMIT=SECOND).returncode == 0
    assert pod.told == {"commit": SECOND}
    assert json.loads(pod.pin.read_text()) == {"commit": SECOND}


def test_why_there_is_no_model_is_in_the_last_words(hub: SmallHub, tmp_path: Path) -> None:
    pod = Pod(hub, tmp_path / "pod", tmp_path / "cache")
    done = pod.pull(FLOWPREFILL_MODEL_COMMIT="main")
    assert done.returncode == 1
    assert pod.termination_log.read_text() in done.stderr
    assert "'main'; accepted is a commit, 40 hex digits" in pod.termination_log.read_text()
    assert pod.pull("no-such-branch").returncode == 1
    assert "hf://org/name@no-such-branch" in pod.termination_log.read_text()
    assert not pod.pin.exists()


def test_what_was_fetched_by_a_branch_is_found_by_it_again_without_a_network(
    hub: SmallHub, tmp_path: Path
) -> None:
    assert Pod(hub, tmp_path / "one", tmp_path / "cache").pull().returncode == 0
    offline = Pod(hub, tmp_path / "two", tmp_path / "cache")
    done = offline.pull(HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert offline.told == {"commit": FIRST}


@pytest.mark.parametrize(
    "missing", [{SHARDS[1], INDEX}, {SHARDS[0], INDEX}, {SHARDS[1]}, {"tokenizer.json"}], ids=sorted
)
def test_a_download_that_broke_off_is_gone_on_with_and_is_no_model_before(
    hub: SmallHub, tmp_path: Path, missing: set[str]
) -> None:
    """Another pod may look at the same cache meanwhile, and the same pod again afterwards."""
    hub.branches["main"] = commit_of(3)
    hub.refused |= missing
    pod = Pod(hub, tmp_path / "pod", tmp_path / "cache")
    assert pod.pull().returncode == 1
    offline = pod.pull(HF_HUB_OFFLINE="1", FLOWPREFILL_MODEL_COMMIT=commit_of(3))
    assert (offline.returncode == 0) == (missing == {"tokenizer.json"}), "the weights have to be whole"
    hub.refused.clear()
    done = Pod(hub, tmp_path / "other", tmp_path / "cache").pull(FLOWPREFILL_MODEL_COMMIT=commit_of(3))
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.rpartition(" ")[2].strip())
    assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == SHARDED
