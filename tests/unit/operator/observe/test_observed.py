"""Objects cut down to what decisions read."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, JOBS, PODS, RECORDS
from flowprefill_operator.observe.observed import Container, Job, Pod, Record, Workload, observe
from support.cluster_objects import (
    CREATED,
    ended,
    owned_object,
    pod_status,
    running,
    terminated,
    unschedulable,
    waiting,
)


def pod(status: dict[str, Any], **metadata: Any) -> Pod:
    labels = {"flowprefill.io/role": "prefill", "flowprefill.io/revision": "rev"}
    item = owned_object(PODS, "p", labels=labels, status=status)
    item["metadata"] |= metadata
    found = observe(PODS, item).detail
    assert isinstance(found, Pod)
    return found


def container(status: dict[str, Any]) -> Container:
    (found,) = pod(pod_status(status)).containers
    return found


def test_a_ready_pod() -> None:
    found = pod(pod_status(running(ready=True), phase="Running", ready=True))
    assert (found.role, found.revision, found.ip, found.since) == ("prefill", "rev", "10.0.0.9", CREATED)
    assert (found.phase, found.ready, found.terminating, found.unschedulable) == (
        "Running",
        True,
        False,
        None,
    )


def test_a_pod_that_has_just_been_made() -> None:
    found = pod({})
    assert (found.phase, found.ready, found.ip, found.containers) == ("Pending", False, None, ())
    assert found.unschedulable is None


def test_a_pod_that_has_no_node_and_one_that_stops() -> None:
    assert pod(unschedulable("no room")).unschedulable == "no room"
    assert pod({}, deletionTimestamp=CREATED).terminating


def test_containers_come_in_the_order_in_which_they_start() -> None:
    found = pod(pod_status(waiting("PodInitializing", name="prefill"), init=(running(name="model"),)))
    assert [(c.name, c.init, c.running) for c in found.containers] == [
        ("model", True, True),
        ("prefill", False, False),
    ]


def test_states_of_a_container() -> None:
    assert container(waiting("ErrImagePull", "denied")).waiting == ("ErrImagePull", "denied")
    found = container(ended(3, "Error", "no model"))
    assert (found.ended, found.exit_code, found.running) == (("Error", "no model"), 3, False)
    found = container(running(restarts=2, last=terminated(137, "OOMKilled")))
    assert (found.running, found.restarts) == (True, 2)
    assert (found.ended, found.ended_before, found.exit_code) == (None, ("OOMKilled", ""), 137)
    # The present end is told rather than the one before.
    assert container(ended(1, last=terminated(2))).exit_code == 1
    assert container(running()).exit_code is None


def test_a_deployment_and_one_that_no_controller_has_seen() -> None:
    status = {
        "observedGeneration": 4,
        "replicas": 3,
        "updatedReplicas": 2,
        "readyReplicas": 1,
        "conditions": [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}],
    }
    item = owned_object(DEPLOYMENTS, "d", spec={"replicas": 3}, status=status)
    assert observe(DEPLOYMENTS, item).detail == Workload(
        replicas=3,
        current=3,
        updated=2,
        ready=1,
        generation_seen=4,
        conditions={"Progressing": ("True", "NewReplicaSetAvailable", "")},
    )
    new = observe(DEPLOYMENTS, owned_object(DEPLOYMENTS, "d", spec={})).detail
    assert new == Workload(replicas=1, current=0, updated=0, ready=0, generation_seen=0, conditions={})


@pytest.mark.parametrize(
    ("conditions", "job"),
    [
        ([], Job(succeeded=False, failed=None)),
        ([{"type": "Complete", "status": "True"}], Job(succeeded=True, failed=None)),
        ([{"type": "Complete", "status": "False"}], Job(succeeded=False, failed=None)),
        (
            [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"}],
            Job(succeeded=False, failed="DeadlineExceeded: too long"),
        ),
    ],
)
def test_a_job(conditions: list[dict[str, str]], job: Job) -> None:
    assert observe(JOBS, owned_object(JOBS, "j", status={"conditions": conditions})).detail == job


def test_a_record() -> None:
    item = owned_object(RECORDS, "r", revision=3, data={"revision": "rev"})
    assert observe(RECORDS, item).detail == Record(number=3, data='{"revision":"rev"}')


def test_data_is_kept_of_config_maps_alone_and_owned_fields_of_everything() -> None:
    entry = {
        "manager": "flowprefill-operator",
        "operation": "Apply",
        "apiVersion": "v1",
        "fieldsV1": {"f:data": {"f:a": {}}},
    }
    item = owned_object(CONFIG_MAPS, "c", version=12, data={"a": "1"})
    item["metadata"] |= {
        "managedFields": [entry],
        "annotations": {"flowprefill.io/applied": "hash"},
        "ownerReferences": [{"uid": "other"}, {"uid": "owner", "controller": True}],
    }
    found = observe(CONFIG_MAPS, item)
    assert (found.data, found.fields, found.applied) == ({"a": "1"}, '{"f:data":{"f:a":{}}}', "hash")
    assert (found.controller, found.resource_version, found.key) == ("owner", "12", (CONFIG_MAPS, "c"))
    assert observe(DEPLOYMENTS, owned_object(DEPLOYMENTS, "d", spec={}, data={"a": "1"})).data == {}


def test_an_object_that_nobody_controls_has_no_controller() -> None:
    found = observe(CONFIG_MAPS, owned_object(CONFIG_MAPS, "c"))
    assert (found.controller, found.fields, found.applied, found.terminating) == (None, None, None, False)
