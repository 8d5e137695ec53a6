"""Models of the Hugging Face hub: a name and a revision become a commit, a commit becomes a directory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from flowprefill.engines.pin import is_commit
from flowprefill.errors import ModelNotLoadable

logger = logging.getLogger(__name__)

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""What a model directory needs: configuration, weights, tokenizer, chat template."""

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_NUMBERED = re.compile(r".+-\d+-of-(\d+)\.safetensors")

Report = Callable[[str, int, int | None], None]


def ensure(repository: str, revision: str, cache: Path | None, report: Report) -> tuple[Path, str]:
    """(directory, commit) of a repository's revision. `cache` None is the hub's own cache.

    A branch or tag is resolved to a commit once per call; a commit that is complete in the cache needs no network. When the
    hub cannot be reached, what the cache last knew of a branch is used, if its weights are whole. Raises ModelNotLoadable.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise ModelNotLoadable(
            f"hf://{repository} is not a repository; accepted are hf://ORG/NAME[@REVISION]"
        )
    local = _local(repository, revision, cache)
    if local is not None and is_commit(revision) and _complete(repository, revision, cache):
        return local
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of whatever HTTP library it uses
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        commit = HfApi().model_info(repository, revision=revision).sha
        if commit is None:
            raise ModelNotLoadable(f"the hub names no commit for hf://{repository}@{revision}")
        if not _complete(repository, commit, cache):
            report(f"downloading {repository}", 0, None)
            snapshot_download(repository, revision=commit, cache_dir=cache, allow_patterns=FILES)
    except GatedRepoError as error:
        raise ModelNotLoadable(
            f"hf://{repository} is gated; accept its terms on the hub and give a token (HF_TOKEN)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotLoadable(
            f"the hub has no hf://{repository}@{revision}, or it needs a token (HF_TOKEN)"
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, HTTPError, OSError) as error:
        if local is not None:
            logger.warning(
                "hub not reachable, using the revision in the cache",
                extra={"model": repository, "revision": local[1]},
            )
            return local
        raise ModelNotLoadable(f"hf://{repository}@{revision} cannot be fetched: {error}") from error
    fetched = _local(repository, commit, cache)
    if fetched is None:
        raise ModelNotLoadable(
            f"hf://{repository}@{commit} has no config.json with safetensors weights; accepted are Hugging Face model "
            f"repositories with safetensors"
        )
    _remember(repository, revision, commit, cache)
    return fetched


def _local(repository: str, revision: str, cache: Path | None) -> tuple[Path, str] | None:
    """(directory, commit) if the cache holds this revision whole."""
    root = _root(repository, cache)
    commit = revision
    if not is_commit(revision):
        reference = root / "refs" / revision
        if not reference.is_file():
            return None
        commit = reference.read_text("utf-8").strip()
    directory = root / "snapshots" / commit
    return (directory, commit) if is_whole(directory) else None


def _complete(repository: str, commit: str, cache: Path | None) -> bool:
    """Whether the cache holds every file of a commit that we fetch: no download of it is under way, or broke off.

    The hub's library lists a commit's files in the cache before it fetches the first. Without that list, as in a cache
    that somebody else filled, the weights alone decide.
    """
    from huggingface_hub import snapshot_download

    if _local(repository, commit, cache) is None:
        return False
    try:
        snapshot_download(
            repository, revision=commit, cache_dir=cache, allow_patterns=FILES, local_files_only=True
        )
    except OSError:  # it names what is missing
        return False
    return True


def _remember(repository: str, revision: str, commit: str, cache: Path | None) -> None:
    """Keep what a branch or tag stands for, as the hub's library does when it fetches one, for times without a network.

    A commit is fetched by its own name, of which that library keeps nothing. A cache that takes no files is no failure.
    """
    if is_commit(revision):
        return
    reference = _root(repository, cache) / "refs" / revision
    unfinished = reference.with_name(f"{reference.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        reference.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(commit, "utf-8")
        unfinished.replace(reference)


def _root(repository: str, cache: Path | None) -> Path:
    """The repository's folder in a cache, as the hub's own library lays it out."""
    from huggingface_hub import constants

    return Path(cache or constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def is_whole(directory: Path) -> bool:
    """Whether a snapshot has a configuration and every weights file: those that its index names, or that are numbered."""
    if not (directory / "config.json").exists():
        return False
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return False
        return all((directory / name).exists() for name in names)
    files = [file.name for file in directory.glob("*.safetensors")]
    totals = [int(found[1]) for name in files if (found := _NUMBERED.fullmatch(name))]
    return bool(files) and len(totals) >= max(totals, default=0)
