"""A user's changes to a planned pod, merged as a strategic merge patch.

Mappings merge key by key and null removes a key. Lists of named things merge item by item (containers, volumes and
environment variables by name, mounts by path, ports by number); other lists are replaced. `$patch: delete` in an item
removes it, `$patch: replace` in a mapping or item takes it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""The list fields of a PodSpec that Kubernetes merges, and the key that tells their items apart."""

_DIRECTIVE = "$patch"


def merge(base: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, object]:
    """`base` with `patch` applied; neither is changed."""
    if patch.get(_DIRECTIVE) == "replace":
        return _plain(patch)
    merged = dict(base)
    for key, value in patch.items():
        if key == _DIRECTIVE:
            continue
        present = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = merge(present if isinstance(present, Mapping) else {}, value)
        elif key in MERGE_KEYS and _is_list(value):
            merged[key] = _merge_items(present if _is_list(present) else (), value, MERGE_KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_items(base: Sequence[object], patch: Sequence[object], key: str) -> list[object]:
    items = list(base)
    for change in patch:
        if not isinstance(change, Mapping):
            items.append(change)
            continue
        position = next((at for at, item in enumerate(items) if _key(item, key) == change.get(key)), None)
        if change.get(_DIRECTIVE) == "delete":
            if position is not None:
                del items[position]
        elif position is None:
            items.append(merge({}, change))
        else:
            item = items[position]
            assert isinstance(item, Mapping)
            items[position] = merge(item, change)
    return items


def _key(item: object, key: str) -> object:
    return item.get(key) if isinstance(item, Mapping) else None


def _plain(patch: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in patch.items() if key != _DIRECTIVE}


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
