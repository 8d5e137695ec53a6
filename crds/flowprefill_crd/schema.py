"""From the pydantic models to the structural schema that a CRD needs, and to words about it.

A structural schema names a type at every node, refers to nothing, and closes objects by pruning
instead of `additionalProperties: false`.
Source: Kubernetes, "Specifying a structural schema".
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from flowprefill_crd.base import (
    DNS_LABEL_PATTERN,
    DNS_SUBDOMAIN_PATTERN,
    HOSTNAME_PATTERN,
    IMAGE_PATTERN,
    LABEL_VALUE_PATTERN,
)
from flowprefill_crd.v1alpha1.service import FlowPrefillService

# JSON schema nodes are plain JSON, hence `Any` for their values.
Node = dict[str, Any]

_DROPPED = frozenset({"title", "examples", "$defs", "additionalProperties"})

_PATTERN_WORDS = {
    DNS_LABEL_PATTERN: "lower-case letters, digits and dashes",
    DNS_SUBDOMAIN_PATTERN: "lower-case letters, digits, dashes and dots",
    LABEL_VALUE_PATTERN: "letters, digits, dashes, dots and underscores, with a letter or digit at both ends",
    IMAGE_PATTERN: "visible ASCII characters, no spaces",
    HOSTNAME_PATTERN: "a host name in lower case, with *. before it for all below it",
}


@cache
def schema_of(model: type[BaseModel]) -> Node:
    """The structural schema of a model's documents. Shared: callers do not change it."""
    raw = model.model_json_schema(by_alias=True)
    return _structural(raw, raw.get("$defs", {}))


def service_schema() -> Node:
    """The structural schema of a whole FlowPrefillService. Shared: callers do not change it."""
    return schema_of(FlowPrefillService)


def _structural(node: Node, defs: Node) -> Node:
    """The node with references resolved, nulls removed and only structural keywords left."""
    node = _merged(node, defs)
    out: Node = {key: value for key, value in node.items() if key not in _DROPPED}
    if "description" in out:
        out["description"] = one_line(out["description"])
    if "const" in out:
        out["enum"] = [out.pop("const")]
    if "properties" in out:
        out["properties"] = {name: _structural(child, defs) for name, child in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _structural(node["additionalProperties"], defs)
    if "propertyNames" in out:
        del out["propertyNames"]
    if "items" in out:
        out["items"] = _structural(node["items"], defs)
    if out.get("type") == "array":
        out.setdefault("x-kubernetes-list-type", "atomic")
    if out.get("type") == "integer":
        out["format"] = "int32" if out.get("maximum", 2**63) < 2**31 else "int64"
    _set_default(out)
    return out


def _merged(node: Node, defs: Node) -> Node:
    """The node with its reference and its alternative `null` folded in; what stands beside them wins."""
    while True:
        if "$ref" in node:
            beside = {key: value for key, value in node.items() if key != "$ref"}
            node = {**defs[node["$ref"].rpartition("/")[2]], **beside}
        elif {"type": "null"} in node.get("anyOf", ()):
            (only,) = (option for option in node["anyOf"] if option != {"type": "null"})
            beside = {key: value for key, value in node.items() if key != "anyOf"}
            node = {**only, **beside}
        else:
            return node


def _set_default(node: Node) -> None:
    """Keep a default that says something; an object's default is what its fields default to.

    The API server checks an object's default against the object's rules before it fills in the
    defaults below, so `{}` would not do.
    """
    if node.get("type") == "object" and "properties" in node:
        has_default = node.pop("default", None) is not None
        below = {name: child["default"] for name, child in node["properties"].items() if "default" in child}
        if has_default and below:
            node["default"] = below
    elif node.get("default", 0) in (None, [], {}, ""):
        del node["default"]


def one_line(text: str) -> str:
    """The text with line breaks inside a paragraph turned into spaces."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def node_at(root: Node, path: tuple[str | int, ...]) -> Node | None:
    """The schema at a path below `root`, such as ("spec", "sloClasses", 0, "name"); None when there is none."""
    node = root
    for step in path:
        if isinstance(step, int):
            child = node.get("items")
        else:
            child = node.get("properties", {}).get(step, node.get("additionalProperties"))
        if child is None:
            return None
        node = child
    return node


def accepted(node: Node) -> str:
    """In words, what a node accepts: "an integer from 1 to 16"."""
    match node:
        case {"enum": [only]}:
            return str(only)
        case {"enum": options}:
            return "one of " + ", ".join(options)
        case {"x-kubernetes-int-or-string": True}:
            return 'an amount such as 2, "500m" or "16Gi"'
        case {"type": "integer", "minimum": low, "maximum": high}:
            return f"an integer from {low} to {high}"
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "string", "x-kubernetes-validations": [{"message": message}, *_]}:
            return str(message).removeprefix("use ")
        case {"type": "string"}:
            return "a string" + _limits(node)
        case {"type": "array"}:
            low, high = node.get("minItems", 0), node.get("maxItems")
            return "a list" if high is None else f"a list of {low} to {high} items"
        case {"type": "object", "properties": properties}:
            return "an object with the fields " + ", ".join(properties)
        case {"type": "object", "additionalProperties": child}:
            return f"at most {node.get('maxProperties', 'any number of')} entries, each {accepted(child)}"
        case {"type": "object"}:
            return "an object"
        case _:
            return str(node.get("type", "another value"))


def _limits(node: Node) -> str:
    words = f" of {node.get('minLength', 0)} to {node['maxLength']} characters" if "maxLength" in node else ""
    if "pattern" in node:
        pattern = node["pattern"]
        words += f": {_PATTERN_WORDS[pattern]}" if pattern in _PATTERN_WORDS else f" matching {pattern}"
    return words
