"""Caches as the hub's own library leaves them, and that library without a network."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def write_directory(path: Path, *, weights: bytes = b"\x00" * 64, name: str = "model.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    (path / name).write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return path


def write_snapshot(cache: Path, commit: str, *, ref: str | None = None) -> Path:
    """What the hub's own cache looks like for org/name."""
    root = cache / "models--org--name"
    if ref is not None:
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / ref).write_text(commit)
    return write_directory(root / "snapshots" / commit)


class Hub:
    """Stands in for the hub: names a commit, and writes a snapshot when asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, commit: str | None) -> None:
        import huggingface_hub

        self.questions: list[str] = []
        self.downloads: list[tuple[str, Path]] = []
        self.commit = commit
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repository: str, *, revision: str) -> Hub:
        self.questions.append(revision)
        if self.commit is None:
            raise ConnectionError("no route to host")
        return self

    @property
    def sha(self) -> str | None:
        return self.commit

    def snapshot_download(
        self,
        repository: str,
        *,
        revision: str,
        cache_dir: Path,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:  # a cache without a list of the commit's files
            return str(cache_dir / "models--org--name" / "snapshots" / revision)
        self.downloads.append((revision, cache_dir))
        return str(write_snapshot(cache_dir, revision))
