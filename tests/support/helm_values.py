"""Values that the chart is tested with: sets written by hand, one with everything at once, and every toggle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MONITORS = ("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/ServiceMonitor")
NAMESPACES = ("team-a", "team-b")

SCHEDULING: dict[str, Any] = {
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "control", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {
                        "matchExpressions": [
                            {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}
                        ]
                    }
                ]
            }
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 50,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
                    },
                }
            ]
        },
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"},
        {
            "maxSkew": 2,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"mine": "yes"}},
        },
    ],
    "priorityClassName": "system-cluster-critical",
}

POD: dict[str, Any] = {
    "commonLabels": {"team": "serving"},
    "podLabels": {"tier": "control"},
    "podAnnotations": {"example.com/note": "a: b"},
    "deploymentAnnotations": {"example.com/owner": "somebody"},
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "credentials", "key": "password"}}},
    ],
    "resources": {"requests": {"cpu": "100m", "memory": "200Mi"}, "limits": {"cpu": 1, "memory": "1Gi"}},
    "livenessProbe": {"periodSeconds": 20, "initialDelaySeconds": 5},
    "terminationGracePeriodSeconds": 60,
}

IMAGES: dict[str, Any] = {
    "image": {"registry": "registry.example.com:5000/team", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "regcred"}, {"name": "more.creds"}],
    "serving": {
        "images": {
            "torch": {"tag": "own"},
            "vllm": {"registry": "other.example.com", "digest": f"sha256:{'a' * 64}"},
        }
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Values, and the APIs of others that they need."""

    values: Mapping[str, Any] = field(default_factory=dict)
    apis: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "defaults": Case(),
    "namespaces": Case(values={"namespaces": list(NAMESPACES)}),
    "two-replicas": Case(values={"replicaCount": 2}),
    "two-replicas-without-budget": Case(
        values={"replicaCount": 2, "podDisruptionBudget": {"enabled": False}}
    ),
    "no-leader-election": Case(values={"leaderElection": {"enabled": False}}),
    "recreate": Case(values={"strategy": {"type": "Recreate"}}),
    "rolling-percent": Case(
        values={
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": "100%", "maxUnavailable": 1},
            }
        }
    ),
    "no-rbac": Case(values={"rbac": {"create": False, "aggregate": False}}),
    "own-account": Case(values={"serviceAccount": {"create": False, "name": "mine"}}),
    "no-crd": Case(values={"crds": {"create": False}}),
    "crd-not-kept": Case(values={"crds": {"keep": False}}),
    "network-policy": Case(values={"networkPolicy": {"enabled": True}}),
    "network-policy-closed": Case(
        values={
            "networkPolicy": {"enabled": True},
            "monitoring": {"from": []},
            "serving": {"networkPolicy": False},
        }
    ),
    "images": Case(values=IMAGES),
    "scheduling": Case(values=SCHEDULING),
    "pod": Case(values=POD),
    "names": Case(values={"fullnameOverride": f"0-{'long-name-' * 12}end", "nameOverride": "fp"}),
    "operator": Case(values={"logLevel": "debug", "logFormat": "text", "resyncSeconds": 5}),
    "pod-monitor": Case(values={"monitoring": {"labels": {"release": "prometheus"}}}, apis=MONITORS),
    "service-monitor": Case(
        values={
            "monitoring": {
                "podMonitor": {"enabled": False},
                "serviceMonitor": {"enabled": True},
                "interval": "15s",
            }
        },
        apis=MONITORS,
    ),
    "everything": Case(
        values={
            **SCHEDULING,
            **POD,
            **IMAGES,
            "replicaCount": 2,
            "namespaces": list(NAMESPACES),
            "networkPolicy": {"enabled": True},
            "monitoring": {
                "labels": {"release": "prometheus"},
                "from": [
                    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                    {
                        "namespaceSelector": {
                            "matchExpressions": [
                                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["m"]}
                            ]
                        },
                        "podSelector": {"matchLabels": {"app": "prometheus"}},
                    },
                ],
            },
            "serviceAccount": {"name": "fp-account", "annotations": {"example.com/role": "x"}},
        },
        apis=MONITORS,
    ),
}
"""Name of a case to the case."""

TOGETHER: dict[str, dict[str, Any]] = {
    "serviceAccount.create=false": {"serviceAccount": {"name": "mine"}},
    "monitoring.serviceMonitor.enabled=true": {"monitoring": {"podMonitor": {"enabled": False}}},
    "podDisruptionBudget.enabled=false": {"replicaCount": 2},
}
"""What a toggle needs besides itself."""


def toggles(schema: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Case]:
    """Every other value of each boolean, choice and bounded number of the chart, one at a time."""
    found: dict[str, Case] = {}
    for path, entry in _leaves(schema, ()):
        default: Any = defaults
        for step in path:
            default = default[step]
        for value in _others(entry, default):
            name = f"{'.'.join(path)}={json.dumps(value)}"
            values: dict[str, Any] = {path[-1]: value}
            for step in reversed(path[:-1]):
                values = {step: values}
            found[name] = Case(values=_merged(values, TOGETHER.get(name, {})), apis=MONITORS)
    return found


def _leaves(
    schema: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    for name in schema.get("required", ()):
        entry = schema["properties"][name]
        if "required" in entry:
            yield from _leaves(entry, (*path, name))
        else:
            yield (*path, name), entry


def _others(entry: Mapping[str, Any], default: object) -> list[object]:
    choices: list[object] = list(entry.get("enum", ()))
    if entry.get("type") == "boolean":
        choices = [True, False]
    if entry.get("type") == "integer":
        choices = [entry["minimum"], entry["maximum"]]
    return [choice for choice in choices if choice != default]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(first)
    for name, value in second.items():
        mine = found.get(name)
        found[name] = _merged(mine, value) if isinstance(mine, dict) else value
    return found
