"""Which fields of an object are still as the operator applied them, read from the API server's own records.

Server-side apply notes every field that a manager set (`metadata.managedFields`, format FieldsV1). When somebody else
changes such a field, or removes it, the server takes it out of our entry. So an object is unchanged where the operator
set it if and only if our entry still covers every field that was applied. Comparing values instead would need the server's
defaulting and its ways to write quantities.

Source: Kubernetes documentation, Server-Side Apply; sigs.k8s.io/structured-merge-diff, fieldpath serialization.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

IDENTITY = ("apiVersion", "kind")
IDENTIFYING = ("name", "namespace")
"""Fields of an applied object that name it; the server does not record them as set."""


def applied_fields(item: Mapping[str, Any], manager: str) -> dict[str, Any] | None:
    """The fields that `manager` owns by apply in the object itself; None when it owns none."""
    for entry in item.get("metadata", {}).get("managedFields", ()):
        if (
            entry.get("manager") == manager
            and entry.get("operation") == "Apply"
            and not entry.get("subresource")
            and entry.get("apiVersion") == item.get("apiVersion")
        ):
            fields: dict[str, Any] = entry.get("fieldsV1", {})
            return fields
    return None


def covers(fields: Mapping[str, Any], applied: Mapping[str, Any]) -> bool:
    """Whether `fields` holds every field that the object `applied` sets."""
    body = {key: value for key, value in applied.items() if key not in IDENTITY}
    meta = body.get("metadata")
    if isinstance(meta, Mapping):
        body["metadata"] = {key: value for key, value in meta.items() if key not in IDENTIFYING}
    return _covers_mapping(fields, body)


def _covers(fields: Mapping[str, Any], value: object) -> bool:
    """`fields` is the node of a field that is owned; an empty node is a leaf or an atomic whole."""
    if not fields or fields.keys() == {"."}:
        return True
    if isinstance(value, Mapping):
        return _covers_mapping(fields, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _covers_list(fields, value)
    return True


def _covers_mapping(fields: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    for key, child in value.items():
        if child is None or child == []:
            continue
        node = fields.get(f"f:{key}")
        if node is None or not _covers(node, child):
            return False
    return True


def _covers_list(fields: Mapping[str, Any], items: Sequence[object]) -> bool:
    keyed = [(json.loads(key[2:]), node) for key, node in fields.items() if key.startswith("k:")]
    values = {key[2:] for key in fields if key.startswith("v:")}
    for item in items:
        if isinstance(item, Mapping):
            node = next((node for keys, node in keyed if _has_keys(item, keys)), None)
            if node is None or not _covers(node, item):
                return False
        elif values and json.dumps(item, separators=(",", ":")) not in values:
            return False
    return True


def _has_keys(item: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
    """Whether the list's item is the one with these keys. A key that the item leaves out has the server's default."""
    return all(item[key] == wanted for key, wanted in keys.items() if key in item)
