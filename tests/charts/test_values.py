"""Values that are refused, with a message that says why, before anything reaches a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.helm import CHART, Helm, default_values, values_schema

UNKNOWN = "unknownKey"


def closed_objects(entry: dict[str, Any], path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all objects with properties that the schema describes, through lists (0) and references."""
    if "$ref" in entry:
        return closed_objects(values_schema()["$defs"][entry["$ref"].rsplit("/", 1)[-1]], path)
    if entry.get("type") == "array":
        return closed_objects(entry["items"], (*path, 0))
    if "properties" not in entry:
        return []
    below = [closed_objects(part, (*path, name)) for name, part in entry["properties"].items()]
    return [path, *(found for part in below for found in part)]


def nested(path: tuple[str | int, ...], leaf: Any) -> Any:
    """`leaf` below the keys of the path; 0 is a list of one."""
    for step in reversed(path):
        leaf = [leaf] if step == 0 else {str(step): leaf}
    return leaf


def shown(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path)) or "values"


@pytest.mark.parametrize("path", closed_objects(values_schema()), ids=shown)
def test_an_unknown_key_is_refused_wherever_it_stands(helm: Helm, path: tuple[str | int, ...]) -> None:
    said = helm.refusal(nested(path, {UNKNOWN: 1}))
    assert UNKNOWN in said


def test_every_mapping_of_the_default_values_refuses_unknown_keys_or_is_a_map_of_the_users_own() -> None:
    free = {"commonLabels", "nodeSelector", "podLabels", "podAnnotations", "deploymentAnnotations"}
    free |= {"serviceAccount.annotations", "monitoring.labels", "resources.requests", "resources.limits"}
    closed = {shown(path) for path in closed_objects(values_schema())}

    def mappings(node: object, path: tuple[str, ...] = ()) -> set[str]:
        if not isinstance(node, dict):
            return set()
        below = [mappings(part, (*path, name)) for name, part in node.items()]
        return {shown(path)}.union(*below)

    assert mappings(default_values()) == (closed | free) & mappings(default_values())


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"replicaCount": 3}, "replicaCount"),
        ({"replicaCount": "1"}, "replicaCount"),
        ({"logLevel": "verbose"}, "logLevel"),
        ({"resyncSeconds": 0}, "resyncSeconds"),
        ({"leaderElection": {"leaseSeconds": 1}}, "leaseSeconds"),
        ({"leaderElection": None}, "leaderElection"),
        ({"namespaces": ["a", "a"]}, "namespaces"),
        ({"namespaces": ["Team"]}, "namespaces"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"image": {"repository": "https://example.com/x"}}, "repository"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"imagePullSecrets": ["regcred"]}, "imagePullSecrets"),
        ({"monitoring": {"interval": "30"}}, "interval"),
        ({"monitoring": {"from": [{}]}}, "from"),
        ({"podLabels": {"a": "not a label"}}, "podLabels"),
        ({"resources": {"limits": {"memory": "1 GB"}}}, "memory"),
        ({"strategy": {"rollingUpdate": {"maxSurge": 1}}}, "strategy"),
        ({"livenessProbe": {"httpGet": {"path": "/"}}}, "livenessProbe"),
    ],
    ids=lambda part: json.dumps(part) if isinstance(part, dict) else None,
)
def test_a_bad_value_is_refused_by_name(helm: Helm, bad: dict[str, Any], named: str) -> None:
    said = helm.refusal(bad)
    assert "values don't meet the specifications of the schema" in said
    assert named in said


NO_ELECTION = {"leaderElection": {"enabled": False}}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"replicaCount": 2, **NO_ELECTION},
            "replicaCount is 2 and leaderElection.enabled is false: two operators would both work; enable leader",
        ),
        (
            {"strategy": {"type": "RollingUpdate"}, **NO_ELECTION},
            "enable leader election or use strategy.type Recreate",
        ),
        (
            {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}},
            "strategy.type is Recreate, which takes no strategy.rollingUpdate; leave it out",
        ),
        (
            {"serviceAccount": {"create": False}},
            "serviceAccount.create is false and serviceAccount.name is empty",
        ),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "each operator would be scraped twice"),
        ({"extraEnv": [{"name": "POD_NAME", "value": "x"}]}, "extraEnv has POD_NAME, which the chart sets"),
        (
            {"podLabels": {"app.kubernetes.io/name": "x"}},
            "podLabels has app.kubernetes.io/name, by which the operator's pods are selected",
        ),
        (
            {"commonLabels": {"app.kubernetes.io/instance": "x"}},
            "commonLabels has app.kubernetes.io/instance, by which the operator's pods are selected",
        ),
    ],
    ids=lambda part: json.dumps(part) if isinstance(part, dict) else None,
)
def test_values_that_do_not_fit_together_are_refused_with_what_is_accepted(
    helm: Helm, bad: dict[str, Any], message: str
) -> None:
    assert message in helm.refusal(bad)


def test_lint_has_no_complaint(helm: Helm) -> None:
    said = helm("lint", "--strict", str(CHART)).stdout
    assert "0 chart(s) failed" in said
    assert "WARNING" not in said


def test_a_value_can_be_taken_away_with_null(helm: Helm) -> None:
    """A platform that assigns user ids refuses fixed ones."""
    ids = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    (found,) = [item for item in helm.template({"podSecurityContext": ids}) if item["kind"] == "Deployment"]
    assert found["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
