"""What API servers answer, as errors that decisions are made by. Messages are those of Kubernetes 1.34 to 1.37."""

from __future__ import annotations

import aiohttp
import pytest

from flowprefill_operator.cluster.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Refused,
    Unavailable,
    answer_error,
    no_answer,
)
from support.cluster_objects import status_body

RBAC = (
    'deployments.apps "example-proxy" is forbidden: User "system:serviceaccount:flowprefill-system:flowprefill-operator" '
    'cannot patch resource "deployments" in API group "apps" in the namespace "ns"'
)
LIST = 'deployments.apps is forbidden: User "someone" cannot list resource "deployments" in API group "apps" at the cluster scope'
ESCALATION = (
    'roles.rbac.authorization.k8s.io "example-proxy" is forbidden: user "system:serviceaccount:a:b" (groups=["x"]) is '
    'attempting to grant RBAC permissions not currently held:\n{APIGroups:["discovery.k8s.io"], Resources:["endpointslices"]}'
)
OWNER = (
    'configmaps "example-live" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource you '
    "can't set finalizers on: , <nil>"
)
QUOTA = 'configmaps "x" is forbidden: exceeded quota: small, requested: count/configmaps=1, used: count/configmaps=1, limited: count/configmaps=1'
SECURITY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true (pod or container "x" must set securityContext.runAsNonRoot=true)'
GOING = (
    'configmaps "x" is forbidden: unable to create new content in namespace ns because it is being terminated'
)

ANSWERS: dict[str, tuple[int, str, str, type[ClusterError]]] = {
    "a right is missing": (403, "Forbidden", RBAC, Forbidden),
    "a right to all namespaces is missing": (403, "Forbidden", LIST, Forbidden),
    "the owner's finalizers may not be updated": (403, "Forbidden", OWNER, Forbidden),
    "a right that would be granted is not held": (403, "Forbidden", ESCALATION, Forbidden),
    "a quota is used up": (403, "Forbidden", QUOTA, Refused),
    "pod security": (403, "Forbidden", SECURITY, Refused),
    "a namespace that goes away": (403, "Forbidden", GOING, Refused),
    "a webhook": (403, "", 'admission webhook "a.b" denied the request: no', Refused),
    "a webhook that quotes rights": (
        403,
        "Forbidden",
        'admission webhook "a.b" denied the request: the User may not; it cannot',
        Refused,
    ),
    "a token that is over": (401, "Unauthorized", "Unauthorized", Forbidden),
    "no such object": (404, "NotFound", 'deployments.apps "x" not found', NotFound),
    "a verb that a resource lacks": (
        405,
        "MethodNotAllowed",
        "the server does not allow this method",
        NotFound,
    ),
    "somebody else's field": (
        409,
        "Conflict",
        'Apply failed with 1 conflict: conflict with "kubectl" using v1: .data.key',
        Conflict,
    ),
    "a name that is taken": (409, "AlreadyExists", 'configmaps "x" already exists', Conflict),
    "a field that is wrong": (
        422,
        "Invalid",
        'Deployment.apps "x" is invalid: spec.replicas: must be',
        Invalid,
    ),
    "a body that cannot be read": (400, "BadRequest", "json: cannot unmarshal", Invalid),
    "a content type that is unknown": (415, "UnsupportedMediaType", "not supported", Invalid),
    "too many requests": (429, "TooManyRequests", "please try again later", Unavailable),
    "a leader that is being chosen": (500, "InternalError", "etcdserver: leader changed", Unavailable),
    "no server behind the load balancer": (503, "ServiceUnavailable", "unavailable", Unavailable),
    "a time-out on the server": (504, "Timeout", "request did not complete within 30s", Unavailable),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_the_error_that_says_what_can_be_done(case: str) -> None:
    status, reason, message, expected = ANSWERS[case]
    found = answer_error("patch", "deployments.apps", status, status_body(status, reason, message))
    assert type(found) is expected
    assert (found.status, found.reason, found.message) == (status, reason, message)
    assert str(found) == f"patch deployments.apps: {message}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"", "HTTP 502"),
        (b"[]", "[]"),
        (b'{"kind": "Status"}', '{"kind": "Status"}'),
        (b"\xff" * 1000, "\ufffd" * 300),
    ],
)
def test_an_answer_of_something_in_between_is_told_as_it_is_and_in_part(body: bytes, message: str) -> None:
    found = answer_error("get", "pods", 502, body)
    assert type(found) is Unavailable
    assert found.message == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError(), "TimeoutError"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
    ],
)
def test_no_answer_is_worth_another_try(error: BaseException, message: str) -> None:
    found = no_answer("list", "pods", error)
    assert type(found) is Unavailable
    assert (found.status, found.reason, found.message) == (0, "Unreachable", message)
