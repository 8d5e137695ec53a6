"""Reading rights and their use: what the tests of the operator's rights stand on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.rbac import Triple, allowed, compare, used

OPERATOR = "system:serviceaccount:system:operator"


def event(
    verb: str,
    resource: str,
    *,
    group: str | None = None,
    subresource: str | None = None,
    code: int = 200,
    user: str = OPERATOR,
    stage: str = "ResponseComplete",
    **more: Any,
) -> dict[str, Any]:
    """An audit event at level Metadata, in the server's form: the core group has no apiGroup."""
    reference = {"resource": resource, "namespace": "default", "apiVersion": "v1"}
    reference |= {} if group is None else {"apiGroup": group}
    reference |= {} if subresource is None else {"subresource": subresource}
    return {
        "kind": "Event",
        "apiVersion": "audit.k8s.io/v1",
        "level": "Metadata",
        "stage": stage,
        "verb": verb,
        "user": {"username": user},
        "objectRef": reference,
        "responseStatus": {"metadata": {}, "code": code},
        **more,
    }


def log(folder: Path, *events: dict[str, Any], tail: str = "") -> Path:
    path = folder / "audit.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in events) + tail)
    return path


def test_uses_of_one_user_are_read_with_group_and_subresource(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        event("list", "pods"),
        event("patch", "flowprefillservices", group="flowprefill.io", subresource="status"),
        event("get", "secrets", user="somebody"),
    )
    assert used(path, OPERATOR) == {
        Triple("", "pods", "list"),
        Triple("flowprefill.io", "flowprefillservices/status", "patch"),
    }


def test_a_patch_that_created_its_object_is_a_use_of_create_too(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        event("patch", "services", code=201),
        event("patch", "deployments", group="apps", code=200),
    )
    assert used(path, OPERATOR) == {
        Triple("", "services", "patch"),
        Triple("", "services", "create"),
        Triple("apps", "deployments", "patch"),
    }


def test_a_refused_request_is_a_use(tmp_path: Path) -> None:
    path = log(tmp_path, event("delete", "jobs", group="batch", code=403))
    assert used(path, OPERATOR) == {Triple("batch", "jobs", "delete")}


def test_a_watch_counts_from_its_start(tmp_path: Path) -> None:
    path = log(tmp_path, event("watch", "pods", stage="ResponseStarted"))
    assert used(path, OPERATOR) == {Triple("", "pods", "watch")}


def test_requests_for_no_object_and_half_written_lines_are_left_out(tmp_path: Path) -> None:
    discovery = event("get", "x")
    del discovery["objectRef"]
    path = log(tmp_path, discovery, tail='{"kind": "Event", "stage"')
    assert used(path, OPERATOR) == frozenset()


def test_an_impersonated_user_is_the_one_who_asked(tmp_path: Path) -> None:
    as_operator = event("list", "pods", user="admin", impersonatedUser={"username": OPERATOR})
    path = log(tmp_path, as_operator)
    assert used(path, OPERATOR) == {Triple("", "pods", "list")}
    assert used(path, "admin") == frozenset()


def test_rules_are_multiplied_out() -> None:
    rules = [
        {"apiGroups": ["", "apps"], "resources": ["a", "b/status"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["c"], "resourceNames": ["one"], "verbs": ["update"]},
    ]
    assert allowed(rules) == {
        *(Triple(g, r, v) for g in ("", "apps") for r in ("a", "b/status") for v in ("get", "list")),
        Triple("", "c", "update"),
    }


@pytest.mark.parametrize("part", ["apiGroups", "resources", "verbs"])
def test_rules_that_cannot_be_listed_are_refused(part: str) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"], part: ["*"]}
    with pytest.raises(ValueError, match="more than can be listed"):
        allowed([rule])
    with pytest.raises(ValueError, match="allows no resource"):
        allowed([{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}])


def test_missing_and_unused_rights_are_told() -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    found = compare({Triple("", "pods", "list"), Triple("apps", "deployments", "patch")}, rules)
    assert found.missing == (Triple("apps", "deployments", "patch"),)
    assert found.unused == (Triple("", "pods", "get"),)
    assert str(found) == "missing: patch deployments.apps; unused: get pods"


def test_rights_held_to_be_granted_count_as_used_and_must_be_held() -> None:
    rules = [{"apiGroups": ["d"], "resources": ["slices"], "verbs": ["watch"]}]
    held = compare([], rules, granted=[Triple("d", "slices", "watch")])
    assert (held.missing, held.unused) == ((), ())
    lacking = compare([], rules, granted=[Triple("d", "slices", "get")])
    assert lacking.missing == (Triple("d", "slices", "get"),)
