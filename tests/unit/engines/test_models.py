"""Model URIs, and what becomes of each."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from flowprefill.engines import hub, models
from flowprefill.engines.models import cache_directory, fingerprint, resolve_model
from flowprefill.errors import ModelNotLoadable
from support.hub_cache import COMMIT, OTHER, Hub, write_directory, write_snapshot


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("smollm", "accepted are embedded://"),
        ("http://x/y", "accepted are embedded://"),
        ("embedded://nothing", "smollm2-135m-instruct"),
        ("file://relative/path", "three slashes"),
        ("hf://no-organisation", "hf://ORG/NAME"),
        ("hf://../../etc", "hf://ORG/NAME"),
        ("pvc://claim/../../etc", "inside it"),
        ("file:///nowhere/at/all", r"config\.json"),
    ],
)
def test_a_uri_that_means_nothing_is_refused_with_what_is_accepted(uri: str, word: str) -> None:
    with pytest.raises(ModelNotLoadable, match=word):
        resolve_model(uri)


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "my-model")
    resolved = resolve_model(f"file://{path}")
    assert (resolved.path, resolved.name) == (path, "my-model")
    assert resolved.revision == fingerprint(path)


def test_a_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    one, same = write_directory(tmp_path / "one"), write_directory(tmp_path / "two")
    assert fingerprint(one) == fingerprint(same)
    other_weights = write_directory(tmp_path / "three", weights=b"\x01" * 64)
    assert fingerprint(other_weights) != fingerprint(one)
    (same / "config.json").write_text('{"model_type": "qwen2"}')
    assert fingerprint(same) != fingerprint(one)


def test_a_claims_path_is_where_the_claim_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CLAIMS", tmp_path)
    path = write_directory(tmp_path / "claim" / "models" / "x")
    assert resolve_model("pvc://claim/models/x").path == path


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWPREFILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/flowprefill")
    monkeypatch.setenv("FLOWPREFILL_CACHE", "/mine")
    assert cache_directory() == Path("/mine")
    assert cache_directory(tmp_path) == tmp_path


def test_a_branch_becomes_a_commit_and_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Hub(monkeypatch, commit=COMMIT)
    first = resolve_model("hf://org/name", cache_dir=tmp_path)
    assert first.revision == COMMIT
    assert first.path == tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert resolve_model("hf://org/name", "main", cache_dir=tmp_path) == first
    assert there.questions == ["main", "main"]
    assert there.downloads == [(COMMIT, tmp_path / "hub")]


def test_a_commit_in_the_cache_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hub(monkeypatch, commit=None)
    write_snapshot(tmp_path / "hub", COMMIT)
    assert resolve_model(f"hf://org/name@{COMMIT}", cache_dir=tmp_path).revision == COMMIT
    assert there.questions == []


def test_the_uris_revision_wins_over_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hub(monkeypatch, commit=COMMIT)
    resolve_model("hf://org/name@v2", "v1", cache_dir=tmp_path)
    assert there.questions == ["v2"]


def test_without_a_network_a_branch_is_what_the_cache_last_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(monkeypatch, commit=None)
    write_snapshot(tmp_path / "hub", OTHER, ref="main")
    assert resolve_model("hf://org/name", cache_dir=tmp_path).revision == OTHER
    with pytest.raises(ModelNotLoadable, match="no route to host"):
        resolve_model("hf://org/name@other-branch", cache_dir=tmp_path)


def test_what_the_hubs_own_library_raises_without_a_network_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = f"http://127.0.0.1:{held.getsockname()[1]}"
    offline = huggingface_hub.HfApi(endpoint=nobody)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: offline)
    with pytest.raises(ModelNotLoadable, match=r"hf://org/name@main cannot be fetched: .*refused"):
        resolve_model("hf://org/name", cache_dir=tmp_path)
    write_snapshot(tmp_path / "hub", OTHER, ref="main")
    assert resolve_model("hf://org/name", cache_dir=tmp_path).revision == OTHER


def test_a_snapshot_with_a_missing_part_is_not_whole(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "s", name="model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not hub.is_whole(path)
    (path / "model.safetensors.index.json").rename(tmp_path / "index")
    assert not hub.is_whole(path), "its name says that there are two"
    (path / "model-00002-of-00002.safetensors").touch()
    assert hub.is_whole(path)
    (tmp_path / "index").rename(path / "model.safetensors.index.json")
    assert hub.is_whole(path)
    (path / "model.safetensors.index.json").write_text("[")
    assert not hub.is_whole(path)


def test_a_repository_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hub(monkeypatch, commit=COMMIT)

    def without_weights(repository: str, *, revision: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        path = write_snapshot(cache_dir, revision)
        (path / "model.safetensors").unlink()
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", without_weights)
    with pytest.raises(ModelNotLoadable, match="safetensors"):
        resolve_model("hf://org/name", cache_dir=tmp_path)
    assert there.downloads == []
