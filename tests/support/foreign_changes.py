"""Every change that somebody else might make to what an object sets, as JSON patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

NAMING: tuple[Path, ...] = (
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
)
"""What says which object it is; nobody can change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One operation of a JSON patch (RFC 6902) on a field at `path`."""

    path: Path
    operation: str
    value: Any = None

    def __str__(self) -> str:
        return f"{self.operation} {pointer(self.path)}"

    def patch(self) -> list[dict[str, Any]]:
        body = {"op": self.operation, "path": pointer(self.path)}
        return [body if self.operation == "remove" else body | {"value": self.value}]


def pointer(path: Path) -> str:
    """RFC 6901."""
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)


def at(item: Any, path: Path) -> Any:
    """The value at a path; None when there is none."""
    for step in path:
        match item, step:
            case Mapping(), str():
                item = item.get(step)
            case list(), int():
                item = item[step] if step < len(item) else None
            case _:
                return None
    return item


def changes(item: Mapping[str, Any]) -> Iterator[Change]:
    """For everything that the object sets: another value where it is a scalar, and its removal."""
    for path, value in _fields(item, ()):
        if path in NAMING or path == ("metadata",):
            continue
        match value:
            case bool():
                yield Change(path=path, operation="replace", value=not value)
            case int():
                yield Change(path=path, operation="replace", value=value + 1)
            case str():
                yield Change(path=path, operation="replace", value=_other(value))
        yield Change(path=path, operation="remove")


def _other(text: str) -> str:
    """Another text that is likely to be valid in the same place."""
    return f"1{text}" if text[:1].isdigit() else f"{text}x"


def _fields(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if path:
        yield path, value
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _fields(child, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, child in enumerate(value):
            yield from _fields(child, (*path, number))
