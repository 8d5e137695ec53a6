"""The objects that are planned for a service, taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowprefill_crd import parse_service
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import PlanSettings
from support.services import document, merged


def planned(changed: dict[str, Any] | None = None, **metadata: Any) -> list[dict[str, Any]]:
    """The objects of the smallest service with `changed` merged into its spec."""
    body = document(**metadata)
    body["spec"] = merged(body["spec"], changed or {})
    return [dict(item) for item in plan(parse_service(body), PlanSettings())]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def deployments(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Deployments by role."""
    return {
        item["spec"]["template"]["metadata"]["labels"]["flowprefill.io/role"]: item
        for item in of_kind(objects, "Deployment")
    }


def pod(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    return deployments(objects)[role]["spec"]["template"]["spec"]


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for item in of_kind(objects, "Deployment"):
        spec = item["spec"]["template"]["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield spec, container


def selects(selector: dict[str, Any], pod: dict[str, str]) -> bool:
    """Whether a label selector selects the pod."""
    for term in selector.get("matchExpressions", ()):
        inside = pod.get(term["key"]) in term["values"]
        if inside != {"In": True, "NotIn": False}[term["operator"]]:
            return False
    return selector.get("matchLabels", {}).items() <= pod.items()


def pod_labels(objects: list[dict[str, Any]], role: str) -> dict[str, str]:
    found: dict[str, str] = deployments(objects)[role]["spec"]["template"]["metadata"]["labels"]
    return found
