"""The file in which a pod keeps the commit of its model, and who follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill.engines import pin
from flowprefill.engines.models import resolve_model
from flowprefill.errors import ModelNotLoadable
from support.hub_cache import COMMIT, OTHER, Hub, write_snapshot


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model-commit.json"
    assert pin.read(path) is None
    pin.write(path, OTHER)
    pin.write(path, COMMIT)
    assert pin.read(path) == COMMIT
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "main", "{}", "[]", '{"commit": "main"}', '{"commit": null}', "\x00"])
def test_a_file_without_a_commit_is_refused_with_its_name_and_what_is_accepted(
    tmp_path: Path, text: str
) -> None:
    (path := tmp_path / "kept").write_text(text)
    with pytest.raises(ModelNotLoadable, match=rf"{path} is .*40 hex digits"):
        pin.read(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache shared with others, who left the branch at OTHER; no hub is reached."""
    Hub(monkeypatch, commit=None)
    write_snapshot(tmp_path / "hub", OTHER, ref="main")
    write_snapshot(tmp_path / "hub", COMMIT)
    return tmp_path


def test_a_server_follows_its_pods_commit_and_not_what_a_shared_cache_knows_of_the_branch(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache / "pod" / "kept"
    monkeypatch.setenv("FLOWPREFILL_MODEL_PIN", str(path))
    assert resolve_model("hf://org/name", cache_dir=cache).revision == OTHER, "nothing is kept yet"
    path.parent.mkdir()
    pin.write(path, COMMIT)
    assert resolve_model("hf://org/name", cache_dir=cache).revision == COMMIT
    assert resolve_model("hf://org/name@main", "v2", cache_dir=cache).revision == COMMIT


def test_a_commit_that_is_given_wins_over_the_one_that_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache / "kept"
    pin.write(path, OTHER)
    monkeypatch.setenv("FLOWPREFILL_MODEL_PIN", str(path))
    assert resolve_model("hf://org/name", commit=COMMIT, cache_dir=cache).revision == COMMIT


@pytest.mark.parametrize("commit", ["main", "", COMMIT[:12], COMMIT.upper(), f"{COMMIT}0"])
def test_a_commit_that_is_none_is_refused(cache: Path, commit: str) -> None:
    with pytest.raises(ModelNotLoadable, match=rf"hf://org/name is '{commit}'; accepted .*40 hex digits"):
        resolve_model("hf://org/name", commit=commit, cache_dir=cache)


def test_models_of_other_places_know_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.setenv("FLOWPREFILL_MODEL_PIN", str(directory / "config.json"))
    assert resolve_model(f"file://{directory}").path == directory
