"""The CustomResourceDefinition as plain data, made from the models."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from flowprefill_crd.schema import Node, service_schema
from flowprefill_crd.v1alpha1.service import GROUP, KIND, PLURAL, VERSION

CRD_NAME = f"{PLURAL}.{GROUP}"
HASH_ANNOTATION = f"{GROUP}/schema-hash"

_COLUMNS = (
    (
        "Ready",
        '.status.conditions[?(@.type=="Ready")].status',
        "Whether all that the spec asks for is in place",
        0,
    ),
    ("Prefill", ".status.roles.prefill.summary", "Prefill pods, ready and wanted", 0),
    ("Decode", ".status.roles.decode.summary", "Decode pods, ready and wanted", 0),
    ("TTFT SLO", ".status.ttftSummary", "Attainment of each SLO class", 0),
    ("URL", ".status.url", "Where clients in the cluster reach the API", 0),
    ("Available", '.status.conditions[?(@.type=="Available")].status', "Whether requests are served", 1),
    ("Reason", '.status.conditions[?(@.type=="Ready")].reason', "Why it is or is not ready", 1),
    ("Revision", ".status.revision.current", "The revision that serves", 1),
    ("Model", ".status.resolvedModel.servedName", "Name that clients send as model", 1),
)


def custom_resource_definition() -> dict[str, Any]:
    """The CRD, annotated with the hash of its own spec."""
    columns = [
        {"name": name, "type": "string", "jsonPath": path, "description": text}
        | ({"priority": priority} if priority else {})
        for name, path, text, priority in _COLUMNS
    ]
    columns.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    spec = {
        "group": GROUP,
        "names": {
            "kind": KIND,
            "listKind": f"{KIND}List",
            "plural": PLURAL,
            "singular": KIND.lower(),
            "shortNames": ["fps"],
        },
        "scope": "Namespaced",
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": columns,
                "schema": {"openAPIV3Schema": root_schema()},
            }
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME, "annotations": {HASH_ANNOTATION: _hash(spec)}},
        "spec": spec,
    }


def root_schema() -> Node:
    """The schema as the API server takes it: it owns apiVersion, kind and metadata itself."""
    schema = service_schema()
    properties = schema["properties"]
    text = {"type": "string"}
    return {
        "type": "object",
        "description": schema["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "Group and version of the API.", **text},
            "kind": {"description": "Kind of the object.", **text},
            "metadata": {"type": "object"},
            "spec": _ordered(properties["spec"]),
            "status": _without(_ordered(properties["status"]), "default"),
        },
    }


def _hash(spec: dict[str, Any]) -> str:
    """Sixteen hex digits over all of the spec that has an effect; descriptions have none."""
    text = json.dumps(_without(spec, "description"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without(node: Any, keyword: str) -> Any:
    """The node without the keyword at any level; a property of that name stays."""
    if isinstance(node, list):
        return [_without(item, keyword) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _without(child, keyword) for name, child in value.items()}
        if key == "properties"
        else _without(value, keyword)
        for key, value in node.items()
        if key != keyword
    }


def _ordered(node: Any) -> Any:
    """The node with its keywords in a reader's order: what it is first, its parts last."""
    first = ("description", "type", "format", "x-kubernetes-int-or-string", "default", "enum")
    last = ("required", "x-kubernetes-validations", "additionalProperties", "items", "properties")
    middle = sorted(key for key in node if key not in first and key not in last)
    out: Node = {key: node[key] for key in (*first, *middle, *last) if key in node}
    if "properties" in out:
        out["properties"] = {name: _ordered(child) for name, child in out["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in out:
            out[key] = _ordered(out[key])
    return out
