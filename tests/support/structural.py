"""The rules that Kubernetes sets for a structural schema, checked without a cluster.

Source: kubernetes.io, "Extend the Kubernetes API with CustomResourceDefinitions", section
"Specifying a structural schema"; k8s.io/apiextensions-apiserver, pkg/apiserver/schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KEYWORDS = frozenset(
    {
        "additionalProperties",
        "anyOf",
        "default",
        "description",
        "enum",
        "format",
        "items",
        "maximum",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minimum",
        "minItems",
        "minLength",
        "minProperties",
        "pattern",
        "properties",
        "required",
        "type",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-validations",
    }
)
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
_INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]
_ROOT_OWNED = ("apiVersion", "kind", "metadata")


def violations(root: dict[str, Any]) -> list[str]:
    """Everything in the schema that an API server would refuse, as `path: what`."""
    found = list(_node(root, ""))
    if root.get("type") != "object":
        found.append(": the root must be an object")
    for name in _ROOT_OWNED:
        allowed = {"type", "description"}
        if set(root["properties"].get(name, {})) - allowed:
            found.append(f"{name}: the API server owns this field; only type and description may be set")
    return found


def _node(node: dict[str, Any], path: str) -> Iterator[str]:
    for keyword in sorted(set(node) - _KEYWORDS):
        yield f"{path}: {keyword} is not part of a structural schema"
    if node.get("x-kubernetes-int-or-string"):
        if "type" in node or node.get("anyOf") != _INT_OR_STRING:
            yield f"{path}: an int-or-string has no type and exactly anyOf integer, string"
    elif node.get("type") not in _TYPES:
        yield f"{path}: type {node.get('type')} is missing or unknown"
    if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        yield f"{path}: anyOf is for int-or-string only"
    yield from _object(node, path)
    yield from _list(node, path)
    if "default" in node:
        yield from _default(node, node["default"], path)
    if any(abs(node.get(limit, 0)) >= 2**53 for limit in ("minimum", "maximum")):
        yield f"{path}: the API server compares limits as float64, which is exact below 2**53 only"
    if node.get("type") == "string" and "pattern" in node:
        re.compile(node["pattern"])
    for item in node.get("x-kubernetes-validations", ()):
        if not item.get("rule") or not item.get("message") or "\n" in item["message"]:
            yield f"{path}: a rule has text and a message of one line"
        field = item.get("fieldPath", "").removeprefix(".")
        if field and _child(node, field.split(".")) is None:
            yield f"{path}: fieldPath {field} is no field"
    for name, child in node.get("properties", {}).items():
        yield from _node(child, f"{path}.{name}".lstrip("."))
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield from _node(node[keyword], f"{path}[]")


def _object(node: dict[str, Any], path: str) -> Iterator[str]:
    if "additionalProperties" in node:
        if "properties" in node:
            yield f"{path}: properties and additionalProperties exclude each other"
        if not isinstance(node["additionalProperties"], dict):
            yield f"{path}: additionalProperties must be a schema; unknown fields are pruned anyway"
    if node.get("x-kubernetes-preserve-unknown-fields") not in (None, True):
        yield f"{path}: x-kubernetes-preserve-unknown-fields is true or left out"
    if ("properties" in node or "additionalProperties" in node) and node.get("type") != "object":
        yield f"{path}: only an object has properties"
    for name in node.get("required", ()):
        if name not in node.get("properties", {}):
            yield f"{path}: required field {name} is no property"
        elif "default" in node["properties"][name]:
            yield f"{path}: required field {name} has a default"


def _list(node: dict[str, Any], path: str) -> Iterator[str]:
    if (node.get("type") == "array") != isinstance(node.get("items"), dict):
        yield f"{path}: a list, and only a list, has one schema for its items"
        return
    kind = node.get("x-kubernetes-list-type")
    keys = node.get("x-kubernetes-list-map-keys")
    items = node.get("items", {})
    if kind == "map":
        for key in keys or [""]:
            if key not in items.get("required", ()) and "default" not in items.get("properties", {}).get(
                key, {}
            ):
                yield f"{path}: the key {key!r} of a map list must be required or have a default"
            if items.get("properties", {}).get(key, {}).get("type") not in ("string", "integer", "boolean"):
                yield f"{path}: the key {key!r} of a map list must be a scalar"
    elif keys is not None:
        yield f"{path}: only a map list has keys"
    if kind == "set" and items.get("type") in ("object", "array"):
        yield f"{path}: the items of a set list must be scalars"
    if node.get("type") == "array" and kind not in ("atomic", "set", "map"):
        yield f"{path}: the list says atomic, set or map"


def _default(node: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    """A default must be valid under its own schema, complete and without unknown fields."""
    if node.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path}: default {value!r} is no amount"
        return
    expected = _TYPES.get(node.get("type", ""))
    if expected is None or not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        yield f"{path}: default {value!r} is not of type {node.get('type')}"
        return
    if "enum" in node and value not in node["enum"]:
        yield f"{path}: default {value!r} is not one of {node['enum']}"
    if isinstance(value, int) and not node.get("minimum", value) <= value <= node.get("maximum", value):
        yield f"{path}: default {value!r} is out of range"
    if isinstance(value, dict):
        properties = node.get("properties", {})
        for name in value:
            if name not in properties:
                yield f"{path}: default holds the unknown field {name}"
        for name, child in properties.items():
            if name in value:
                yield from _default(child, value[name], f"{path}.{name}")
            elif "default" in child:
                # Rules are evaluated on the default as it stands, before those below it are filled in.
                yield f"{path}: default leaves out {name}, which has one itself"
        for name in node.get("required", ()):
            if name not in value:
                yield f"{path}: default lacks the required field {name}"
    if isinstance(value, list):
        for item in value:
            yield from _default(node["items"], item, f"{path}[]")


def _child(node: dict[str, Any] | None, steps: list[str]) -> dict[str, Any] | None:
    for step in steps:
        node = (node or {}).get("properties", {}).get(step)
    return node
