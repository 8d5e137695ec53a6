"""A ServiceAccount with exactly the chart's rights, as a kubeconfig for an operator outside the cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from support.control_plane.plane import ControlPlane

Json = dict[str, Any]

ROOT = Path(__file__).parents[3]
RULES = ROOT / "charts" / "flowprefill" / "templates" / "_operator-rules.tpl"
SYSTEM_NAMESPACE = "flowprefill-system"
ACCOUNT = "flowprefill-operator"
TOKEN_LASTS = "24h"

CLUSTER_RULES: list[Json] = [
    {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "verbs": ["get", "list", "watch"],
    }
]
LEASE_RULES: list[Json] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}
]


def chart_rules() -> list[Json]:
    """What the chart lets the operator do with namespaced objects: the template holds plain YAML between its tags."""
    text = re.sub(r"\{\{.*?\}\}", "", RULES.read_text(encoding="utf-8"), flags=re.DOTALL)
    found: list[Json] = yaml.safe_load(text)
    return found


def without(rules: list[Json], verb: str, resource: str) -> list[Json]:
    """The rules less one verb on one resource."""
    kept: list[Json] = []
    for rule in rules:
        if resource not in rule["resources"]:
            kept.append(rule)
            continue
        others = [name for name in rule["resources"] if name != resource]
        if others:
            kept.append(rule | {"resources": others})
        verbs = [name for name in rule["verbs"] if name != verb]
        if verbs:
            kept.append(rule | {"resources": [resource], "verbs": verbs})
    return kept


def grant(
    plane: ControlPlane,
    rules: list[Json] | None = None,
    *,
    name: str = ACCOUNT,
    namespaces: tuple[str, ...] = (),
) -> None:
    """Create the account, or change its rights; None grants the chart's. They hold in `namespaces`, everywhere when
    there are none."""
    subject = {"kind": "ServiceAccount", "name": name, "namespace": SYSTEM_NAMESPACE}
    rbac = "rbac.authorization.k8s.io"
    granted = chart_rules() if rules is None else rules
    objects: list[Json] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM_NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": SYSTEM_NAMESPACE},
        },
    ]
    everywhere = CLUSTER_RULES if namespaces else granted + CLUSTER_RULES
    roles: list[tuple[str, Json, list[Json]]] = [
        ("ClusterRole", {}, everywhere),
        ("Role", {"namespace": SYSTEM_NAMESPACE}, LEASE_RULES),
        *(("Role", {"namespace": namespace}, granted) for namespace in namespaces),
    ]
    for kind, place, role_rules in roles:
        common = {"apiVersion": f"{rbac}/v1", "metadata": {"name": name, **place}}
        objects.append(common | {"kind": kind, "rules": role_rules})
        reference = {"apiGroup": rbac, "kind": kind, "name": name}
        objects.append(common | {"kind": f"{kind}Binding", "roleRef": reference, "subjects": [subject]})
    body = {"apiVersion": "v1", "kind": "List", "items": objects}
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(body))


def kubeconfig(plane: ControlPlane, url: str, file: Path, *, name: str = ACCOUNT) -> Path:
    """Write a kubeconfig for the account that reaches the API server at `url`."""
    token = plane.kubectl(
        "create", "token", name, "-n", SYSTEM_NAMESPACE, f"--duration={TOKEN_LASTS}"
    ).stdout.strip()
    cluster: Json = {"server": url}
    if url.startswith("https:"):
        cluster["certificate-authority"] = str(plane.pki.ca)
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "operator",
        "clusters": [{"name": "operator", "cluster": cluster}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "operator", "context": {"cluster": "operator", "user": "operator"}}],
    }
    file.write_text(json.dumps(body), encoding="utf-8")
    return file
