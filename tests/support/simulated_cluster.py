"""A small cluster in memory that brings about what `rollout.goal` decides. No I/O, no clock, one seed.

It does what the decisions depend on: server-side apply of `replicas` (a field that its only owner drops falls to 1), the
Deployment controller with its rolling update, pods that get ready or never do and linger when they stop, garbage
collection, an autoscaler, and watches that tell the operator late. An operator may die after any of its writes.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flowprefill_crd import FlowPrefillService, parse_service
from flowprefill_operator import labels
from flowprefill_operator.cluster.client import MANAGER
from flowprefill_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, JOBS, PODS, RECORDS, kind_of
from flowprefill_operator.observe.observed import Key, Observed, observe
from flowprefill_operator.resources.base import Object
from flowprefill_operator.revisions import key_of
from flowprefill_operator.rollout import Goal, goal
from flowprefill_operator.scene import PROXY, WORKER_ROLES
from flowprefill_operator.settings import PlanSettings
from support.services import MINIMAL_SPEC, Spec, document, merged

UID = "uid-of-the-service"
AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
DYING = 0.1
"""Share of passes in which the operator dies half-way."""

Raw = dict[str, Any]
Watcher = Callable[["SimulatedCluster"], None]


class SimulatedCluster:
    """One service and everything that belongs to it.

    Worker pods of revisions in `sick` never get ready, those of revisions in `mute` do and serve no token. `branch` is
    the commit that a model's branch stands for; pods fetch nothing while it is None. `watchers` are called after every event, and raise when something
    must not be.
    """

    def __init__(self, seed: int, *, settings: PlanSettings | None = None) -> None:
        self.rng = random.Random(seed)
        self.settings = PlanSettings() if settings is None else settings
        self.sick: set[str] = set()
        self.mute: set[str] = set()
        self.healthy = True
        self.proven: set[str] = set()
        self.objects: dict[Key, Raw] = {}
        self.pods: dict[str, Raw] = {}
        self.watchers: list[Watcher] = []
        self.profile = '{"points": []}'
        self.branch: str | None = None
        self.service: FlowPrefillService
        self._generation = 0
        self._seen: dict[Key, Raw] = {}
        self._owners: dict[Key, set[str]] = {}
        self._numbers = itertools.count(1)
        self._settling = False

    def ask(self, changes: Spec | None = None) -> str:
        """The smallest service with `changes` is what is wanted now; the name of its revision."""
        self._generation += 1
        body = document(merged(MINIMAL_SPEC, changes or {}), namespace="ns", uid=UID)
        body["metadata"]["generation"] = self._generation
        self.service = parse_service(body)
        return self.goal().target.name

    # What is there.

    def goal(self) -> Goal:
        """What the operator decides on what it has been told so far."""
        return goal(self.service, self.settings, self.observed(), frozenset(self.proven))

    def observed(self) -> dict[Key, Observed]:
        return {key: observe(key[0], item) for key, item in self._seen.items()}

    def deployment(self, role: str, revision: str | None = None) -> Raw | None:
        """The Deployment of a role and revision; for the proxy, its only one."""
        return next(
            (
                item
                for (kind, _), item in self.objects.items()
                if kind == DEPLOYMENTS
                and _label(item, labels.ROLE) == role
                and revision in (None, _label(item, labels.REVISION))
            ),
            None,
        )

    def replicas(self, role: str, revision: str) -> int | None:
        found = self.deployment(role, revision)
        return None if found is None else int(found["spec"]["replicas"])

    def running(self, role: str, revision: str | None = None) -> list[Raw]:
        """Ready pods that are not stopping."""
        return [pod for pod in self.members(role, revision) if _is_ready(pod) and not _stops(pod)]

    def members(self, role: str, revision: str | None = None) -> list[Raw]:
        """All pods that are not gone."""
        return [
            pod
            for pod in self.pods.values()
            if _label(pod, labels.ROLE) == role and revision in (None, _label(pod, labels.REVISION))
        ]

    def serves(self, revision: str) -> bool:
        """Whether every worker role of the revision has a ready pod."""
        roles = {_label(i, labels.ROLE) for i in self.of_revision(revision) if kind_of(i) == DEPLOYMENTS}
        workers = [role for role in roles if role in WORKER_ROLES]
        return bool(workers) and all(self.running(role, revision) for role in workers)

    def complete(self, revision: str) -> bool:
        """Whether the revision's workers are all there and ready, as they are now."""
        found = [
            i
            for i in self.of_revision(revision)
            if kind_of(i) == DEPLOYMENTS and _label(i, labels.ROLE) in WORKER_ROLES
        ]
        return bool(found) and all(
            len(self.running(_label(i, labels.ROLE), revision)) >= i["spec"]["replicas"] for i in found
        )

    def of_revision(self, revision: str) -> list[Raw]:
        """Objects that carry its name, but for the record of it."""
        return [
            item
            for (kind, _), item in self.objects.items()
            if kind != RECORDS and _label(item, labels.REVISION) == revision
        ]

    def records(self) -> dict[str, int]:
        """Numbers of the recorded revisions."""
        return {
            item["data"]["revision"]: item["revision"]
            for (kind, _), item in self.objects.items()
            if kind == RECORDS
        }

    def scale_targets(self) -> list[str]:
        return [
            item["spec"]["scaleTargetRef"]["name"]
            for (kind, _), item in self.objects.items()
            if kind.kind in AUTOSCALERS
        ]

    # What happens.

    def step(self) -> None:
        """One event, whichever comes."""
        event = self.rng.choice(
            (self._operator, self._controller, self._controller, self._pod, self._pod, self._tell, self._tell)
        )
        event()
        self._check()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def settle(self, *, rounds: int = 300) -> Goal:
        """Let everything happen until nothing is left to do; the goal then."""
        self._settling = True
        for _ in range(rounds):
            before = self._state()
            for key in list(self.objects):
                self._control(key)
                self._check()
            self._collect()
            for name in list(self.pods):
                self._advance(name)
                self._check()
            self._tell_all()
            self._operator()
            self._check()
            self._tell_all()
            if self._state() == before:
                self._settling = False
                return self.goal()
        raise AssertionError(f"not settled after {rounds} rounds: {self.goal()}")

    def _happens(self, chance: float) -> bool:
        return self._settling or self.rng.random() < chance

    def _check(self) -> None:
        for watcher in self.watchers:
            watcher(self)

    def _state(self) -> str:
        return json.dumps([list(self.objects.values()), list(self.pods.values()), sorted(self.proven)])

    # The operator.

    def _operator(self) -> None:
        """One pass, or a part of one."""
        decided = self.goal()
        writes = list(self._writes(decided))
        if not self._settling and self.rng.random() < DYING:
            writes = writes[: self.rng.randint(0, len(writes))]
        for write in writes:
            write()
            self._check()
        if decided.to_prove and decided.target.name not in self.mute and self._happens(0.5):
            self.proven.add(decided.target.name)

    def _writes(self, decided: Goal) -> Iterator[Callable[[], None]]:
        for name, replicas in decided.hand_over.items():
            yield lambda name=name, replicas=replicas: self._co_own((DEPLOYMENTS, name), replicas)
        for step in decided.steps:
            for item in step:
                yield lambda item=item: self._apply(item)
        for item in decided.prune:
            yield lambda item=item: self._delete(item.key, item.uid)

    def _co_own(self, key: Key, replicas: int) -> None:
        found = self.objects[key]
        if found["spec"]["replicas"] != replicas:
            self._owners[key] = set()
        self._owners[key].add("replicas")
        self._store(key, {**found, "spec": {**found["spec"], "replicas": replicas}})
        self._seen[key] = self.objects[key]

    def _apply(self, planned: Object) -> None:
        key, item = key_of(planned), copy.deepcopy(dict(planned))
        known = self.objects.get(key)
        if key[0] == DEPLOYMENTS:
            owners = self._owners.setdefault(key, set())
            if "replicas" in item["spec"]:
                if known is None or known["spec"]["replicas"] != item["spec"]["replicas"]:
                    owners.clear()
                owners.add(MANAGER)
            else:
                owners.discard(MANAGER)
                item["spec"]["replicas"] = known["spec"]["replicas"] if known is not None and owners else 1
            fields = {"f:replicas": {}} if MANAGER in owners else {}
            item["metadata"]["managedFields"] = [
                {
                    "manager": MANAGER,
                    "operation": "Apply",
                    "apiVersion": item["apiVersion"],
                    "fieldsV1": {"f:spec": {"f:template": {}, **fields}},
                }
            ]
            if known is not None:
                assert known["spec"]["selector"] == item["spec"]["selector"], "a selector cannot be changed"
        if known is not None and known.get("immutable"):
            assert known["data"] == item["data"], f"{key[1]} is immutable"
        self._store(key, item)
        self._seen[key] = self.objects[key]

    def _store(self, key: Key, item: Raw) -> None:
        known = self.objects.get(key)
        meta = item["metadata"]
        generation = 1
        if known is not None:
            same = known.get("spec") == item.get("spec")
            generation = known["metadata"]["generation"] + (0 if same else 1)
            if "status" in known:
                item["status"] = known["status"]
            ours = {k: v for k, v in known["metadata"].items() if k not in ("resourceVersion", "generation")}
            if (
                same
                and known.get("data") == item.get("data")
                and known.get("revision") == item.get("revision")
                and ours == {**meta, "uid": known["metadata"]["uid"]}
            ):
                return
        uid = known["metadata"]["uid"] if known is not None else f"uid-{next(self._numbers)}"
        version = str(next(self._numbers))
        item["metadata"] = {**meta, "uid": uid, "resourceVersion": version, "generation": generation}
        self.objects[key] = item

    def _delete(self, key: Key, uid: str) -> None:
        found = self.objects.get(key)
        if found is not None and found["metadata"]["uid"] == uid:
            del self.objects[key]
            self._owners.pop(key, None)
        self._seen.pop(key, None)

    def restart(self, role: str, revision: str) -> None:
        """Pods that are no longer ready, for a while."""
        for pod in self.members(role, revision):
            pod["status"] = {"phase": "Running", **_initialized(pod)}

    def hear(self) -> None:
        """The operator hears of everything."""
        self._tell_all()

    def lose(self, key: Key) -> None:
        """Somebody deletes an object, and the operator has heard of it."""
        self._delete(key, self.objects[key]["metadata"]["uid"])

    def prune_everything_but_records(self) -> None:
        """Somebody deletes what there is."""
        for key in [key for key in self.objects if key[0] != RECORDS]:
            self._delete(key, self.objects[key]["metadata"]["uid"])

    def scale(self, role: str, revision: str, replicas: int) -> None:
        """Somebody else sets the number of pods, by the scale subresource."""
        found = self.deployment(role, revision)
        assert found is not None
        key = key_of(found)
        self._owners[key] = {"scale"}
        item = copy.deepcopy(found)
        item["spec"]["replicas"] = replicas
        item["metadata"]["managedFields"] = [
            {**entry, "fieldsV1": {"f:spec": {"f:template": {}}}}
            for entry in item["metadata"]["managedFields"]
        ]
        self._store(key, item)

    # The controllers.

    def _controller(self) -> None:
        if self.objects:
            self._control(self.rng.choice(list(self.objects)))
        if self.rng.random() < 0.3:
            self._collect()

    def _control(self, key: Key) -> None:
        if key[0] == DEPLOYMENTS:
            self._roll(self.objects[key])
        elif key[0] == JOBS:
            self._run(self.objects[key])

    def _roll(self, item: Raw) -> None:
        """One step of the Deployment controller: RollingUpdate with maxSurge 1 and maxUnavailable 0."""
        wanted, template = item["spec"]["replicas"], json.dumps(item["spec"]["template"], sort_keys=True)
        mine = [pod for pod in self._owned(item) if not _stops(pod)]
        fresh = [pod for pod in mine if pod["template"] == template]
        stale = [pod for pod in mine if pod["template"] != template]
        if len(fresh) < wanted and len(mine) < wanted + bool(stale):
            self._create_pod(item, template)
        elif len(fresh) > wanted:
            _stop(sorted(fresh, key=_is_ready)[0])
        elif stale and len([pod for pod in mine if _is_ready(pod)]) > wanted:
            _stop(sorted(stale, key=_is_ready)[0])
        elif stale and wanted == 0:
            _stop(stale[0])
        mine = [pod for pod in self._owned(item) if not _stops(pod)]
        status = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": len(mine),
            "updatedReplicas": len([pod for pod in mine if pod["template"] == template]),
            "readyReplicas": len([pod for pod in mine if _is_ready(pod)]),
        }
        if status != item.get("status"):
            version = str(next(self._numbers))
            meta = {**item["metadata"], "resourceVersion": version}
            self.objects[key_of(item)] = {**item, "status": status, "metadata": meta}

    def _run(self, item: Raw) -> None:
        if not self._owned(item):
            self._create_pod(item, json.dumps(item["spec"]["template"]))

    def _create_pod(self, owner: Raw, template: str) -> None:
        name = f"{owner['metadata']['name']}-{next(self._numbers)}"
        its_labels = dict(owner["spec"]["template"]["metadata"]["labels"])
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "ns",
                "uid": f"uid-{name}",
                "resourceVersion": str(next(self._numbers)),
                "labels": its_labels,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "status": {"phase": "Pending"},
            "owner": owner["metadata"]["uid"],
            "template": template,
        }

    def _owned(self, item: Raw) -> list[Raw]:
        return [pod for pod in self.pods.values() if pod["owner"] == item["metadata"]["uid"]]

    def _collect(self) -> None:
        """Garbage collection: pods whose Deployment or Job is gone are told to stop."""
        present = {item["metadata"]["uid"] for item in self.objects.values()}
        for pod in self.pods.values():
            if pod["owner"] not in present and not _stops(pod):
                _stop(pod)

    def _pod(self) -> None:
        if self.pods:
            self._advance(self.rng.choice(list(self.pods)))

    def _advance(self, name: str) -> None:
        """What a kubelet does to a pod next: it starts, ends or goes away."""
        pod = self.pods[name]
        role = _label(pod, labels.ROLE)
        if _stops(pod):
            if self._happens(0.3):
                del self.pods[name]
        elif role == labels.PROFILER:
            if self.healthy:
                ended = {"exitCode": 0, "reason": "Completed", "message": self.profile}
                pod["status"] = {
                    "phase": "Succeeded",
                    "containerStatuses": [{"name": "profiler", "state": {"terminated": ended}}],
                }
        elif (fetched := self._fetched(pod)) is not None:
            pod["status"] = {"phase": "Pending", "initContainerStatuses": [fetched]}
        elif not _is_ready(pod) and (role == PROXY or _label(pod, labels.REVISION) not in self.sick):
            pod["status"] = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                **_initialized(pod),
            }

    def _fetched(self, pod: Raw) -> Raw | None:
        """The end of a pod's init container that fetches the model at the commit that it is told, else the branch's; None
        when there is nothing to fetch any more."""
        inits = json.loads(pod["template"])["spec"].get("initContainers", ())
        if self.branch is None or not inits or _initialized(pod):
            return None
        (ref,) = [
            variable["valueFrom"]["configMapKeyRef"]
            for variable in inits[0]["env"]
            if variable["name"] == "FLOWPREFILL_MODEL_COMMIT"
        ]
        known = self.objects.get((CONFIG_MAPS, ref["name"]), {}).get("data", {})
        message = json.dumps({"commit": known.get(ref["key"], self.branch)})
        ended = {"exitCode": 0, "reason": "Completed", "message": message}
        return {"name": inits[0]["name"], "state": {"terminated": ended}}

    def _tell(self) -> None:
        """The watch tells the operator of one object, late."""
        keys = list({*self.objects, *self._seen, *((PODS, name) for name in self.pods)})
        if keys:
            self._tell_of(self.rng.choice(sorted(keys, key=lambda key: (key[0].kind, key[1]))))

    def _tell_of(self, key: Key) -> None:
        now = self.pods.get(key[1]) if key[0] == PODS else self.objects.get(key)
        if now is None:
            self._seen.pop(key, None)
        else:
            self._seen[key] = copy.deepcopy(now)

    def _tell_all(self) -> None:
        for key in {*self.objects, *self._seen, *((PODS, name) for name in self.pods)}:
            self._tell_of(key)


def with_images(settings: PlanSettings, tag: str) -> PlanSettings:
    """The settings of an operator of another release."""
    images = {name: f"registry.example/{name}:{tag}" for name in settings.images}
    return replace(settings, images=images, proxy_image=f"registry.example/proxy:{tag}")


def _label(item: Mapping[str, Any], name: str) -> str:
    return str(item["metadata"].get("labels", {}).get(name, ""))


def _is_ready(pod: Raw) -> bool:
    return any(c["type"] == "Ready" for c in pod["status"].get("conditions", ()))


def _initialized(pod: Raw) -> Raw:
    """The part of a pod's status that its init containers have left."""
    name = "initContainerStatuses"
    return {name: pod["status"][name]} if name in pod["status"] else {}


def _stops(pod: Raw) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _stop(pod: Raw) -> None:
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
