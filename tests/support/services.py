"""FlowPrefillServices for tests: a smallest valid one, and values for any field of the schema."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from flowprefill_crd.crd import root_schema

Spec = dict[str, Any]
Path = tuple[str | int, ...]

MINIMAL_SPEC: Spec = {
    "model": {"uri": "embedded://tiny"},
    "sloClasses": [
        {"name": "chat", "ttftMilliseconds": 1000, "default": True},
        {"name": "document", "ttftMilliseconds": 8000},
    ],
}


def document(spec: Spec | None = None, **metadata: Any) -> dict[str, Any]:
    """A whole FlowPrefillService as the API server would give it, with the given spec or the smallest."""
    return {
        "apiVersion": "flowprefill.io/v1alpha1",
        "kind": "FlowPrefillService",
        "metadata": {"name": "example", **metadata},
        "spec": copy.deepcopy(MINIMAL_SPEC if spec is None else spec),
    }


def merged(base: Any, changes: Any) -> Any:
    """`base` with `changes` merged in: objects by field, everything else replaced."""
    if isinstance(base, dict) and isinstance(changes, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}
    return copy.deepcopy(changes)


def with_value(value: Any, path: Path, new: Any) -> Any:
    """A copy of `value` with `new` at the path; missing objects and list items are made."""
    if not path:
        return copy.deepcopy(new)
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        items = list(value or ())
        items += [{}] * (step + 1 - len(items))
        items[step] = with_value(items[step], rest, new)
        return items
    out = dict(value or {})
    out[step] = with_value(out.get(step), rest, new)
    return out


def nodes(node: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every field below a schema node with its path, parents first; the first item stands for a list's items."""
    for name, child in node.get("properties", {}).items():
        yield (*path, name), child
        yield from nodes(child, (*path, name))
        yield from nodes(child.get("items", {}), (*path, name, 0))


def spec_schema() -> dict[str, Any]:
    """The schema of the spec, as in the CRD."""
    schema: dict[str, Any] = root_schema()["properties"]["spec"]
    return schema


def is_leaf(node: dict[str, Any]) -> bool:
    """Whether a field holds a value of its own: a scalar, a map, a list of scalars or a free-form object."""
    return "properties" not in node and "properties" not in node.get("items", {})


def text_path(path: Path) -> str:
    """The path as people write it: `sloClasses[0].name`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


# Values that a made-up text or number would not do for, by the last part of the path.
_OTHER: dict[str, Any] = {
    "uri": "file:///models/other",
    "objective": "99.5",
    "storage": "60Gi",
    "sizeLimit": "70Gi",
    "prometheusAddress": "http://other.example:9090",
    "accessModes": ["ReadWriteMany"],
    "minTtftMilliseconds": 300,
    "maxTtftMilliseconds": 9000,
    "ttftMilliseconds": 1100,
    "maxReplicas": 9,
    "requests": {"cpu": "3"},
    "limits": {"memory": "3Gi"},
    "spec": {"nodeSelector": {"zone": "a"}},
}
_FIRST: dict[str, Any] = {"storage": "50Gi", "maxReplicas": 8, "parentRefs": [{"name": "first"}]}

# What a field needs around it to be valid, by the start of its path.
_AROUND: dict[str, Spec] = {
    "model.revision": {"model": {"uri": "hf://org/name"}},
    "model.secretRef": {"model": {"uri": "hf://org/name"}},
    "model.cache": {"model": {"uri": "hf://org/name"}},
    "sloClasses[0].default": {"sloClasses": [{"name": "chat", "ttftMilliseconds": 1000}]},
}


def example(path: Path, node: dict[str, Any]) -> Any:
    """A valid value for the field that is neither its default nor what `changes` starts from."""
    name = str(path[-1])
    if name in _OTHER:
        return _OTHER[name]
    match node:
        case {"enum": options}:
            return next(option for option in options if option != node.get("default"))
        case {"type": "boolean"}:
            return not node.get("default", False)
        case {"type": "integer", "maximum": high}:
            value = node.get("default", node["minimum"]) + 1
            return value if value <= high else high - 1
        case {"type": "string"}:
            return "another"
        case {"type": "array"}:
            return ["another"]
        case {"type": "object", "additionalProperties": _}:
            return {"another": "another"}
    raise AssertionError(f"no example for {text_path(path)}: {node}")


def _first(node: dict[str, Any]) -> dict[str, Any]:
    """An object with no more than its required fields."""
    return {name: _FIRST.get(name, "first") for name in node.get("required", ())}


def changes() -> Iterator[tuple[str, dict[str, Any], Spec, Spec]]:
    """For every leaf of the spec: its path, its schema, a valid spec, and the same with that leaf changed."""
    schema = spec_schema()
    optional: list[tuple[Path, dict[str, Any]]] = []
    for path, node in nodes(schema):
        if not is_leaf(node):
            optional.append((path, node))
            continue
        name = text_path(path)
        before: Spec = merged(MINIMAL_SPEC, next((v for k, v in _AROUND.items() if name.startswith(k)), {}))
        for parent, parent_node in optional:
            step = (*parent, 0) if "items" in parent_node else parent
            if path[: len(step)] == step and _at(before, step) is None:
                before = with_value(before, step, _first(parent_node.get("items", parent_node)))
        if path[-1] in ("provider", "prometheusAddress"):
            before = with_value(before, (*path[:-1], "prometheusAddress"), "http://first.example:9090")
        yield name, node, before, with_value(before, path, example(path, node))


def _at(value: Any, path: Path) -> Any:
    for step in path:
        if isinstance(step, int):
            value = value[step] if len(value) > step else None
        else:
            value = value.get(step)
        if value is None:
            return None
    return value
