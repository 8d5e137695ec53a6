"""The commit that a pod's hf:// model was fetched at, kept in a file of the pod and told to whoever started it.

A pod's init container fetches the model and writes the file; its server, and whatever restarts in the same pod, follow it.
So what a cache that is shared with others last knew of a branch decides nothing. The file, and the container's last
words, are one object: `{"commit":"<40 hex digits>"}`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from flowprefill.errors import ModelNotLoadable

COMMIT_VARIABLE = "FLOWPREFILL_MODEL_COMMIT"
"""Environment variable: the commit to fetch, whatever the branch says now."""

PIN_VARIABLE = "FLOWPREFILL_MODEL_PIN"
"""Environment variable: path of the file."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit; else it is a branch or a tag, which may move."""
    return _COMMIT.fullmatch(revision) is not None


def checked(commit: str, source: str) -> str:
    """`commit`, which `source` names. Raises ModelNotLoadable when it is none."""
    if not is_commit(commit):
        raise ModelNotLoadable(f"{source} is {commit!r}; accepted is a commit, 40 hex digits in lower case")
    return commit


def pinned() -> str | None:
    """The commit in the file that the environment names; None when it names none, or none that is there."""
    named = os.environ.get(PIN_VARIABLE)
    return read(Path(named)) if named else None


def read(path: Path) -> str | None:
    """The commit in a pin file; None when there is no such file. Raises ModelNotLoadable for any other content."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    try:
        commit = json.loads(text)["commit"]
    except (ValueError, KeyError, TypeError):
        commit = text
    return checked(str(commit), f"the commit in {path}")


def write(path: Path, commit: str) -> None:
    """Keep `commit` in a pin file, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(as_json(commit), encoding="utf-8")
    unfinished.replace(path)


def as_json(commit: str) -> str:
    """The object that names `commit`."""
    return json.dumps({"commit": commit}, separators=(",", ":"))
