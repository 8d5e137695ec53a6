"""Values that the chart is tested with: one set a toggle, and one with everything at once."""

from __future__ import annotations

from collections.abc import Mapping
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
