"""Whether what the operator applied is still as it was, judged from a real API server's managedFields.

A wrong "changed" would make the operator write for ever, a wrong "unchanged" would leave somebody's change in place.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

from flowprefill_crd import FlowPrefillService, parse_service
from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.generate import ROOT
from flowprefill_crd.samples import sample_path
from flowprefill_operator.apply import Applied, Applier
from flowprefill_operator.cluster.client import MANAGER, Cluster
from flowprefill_operator.cluster.connect import Credentials, connected
from flowprefill_operator.kinds import OWNED
from flowprefill_operator.observe.managed_fields import applied_fields, covers
from flowprefill_operator.observe.store import Store
from flowprefill_operator.revisions import key_of
from flowprefill_operator.rollout import Goal, goal
from flowprefill_operator.settings import PlanSettings
from support.control_plane.plane import ControlPlane
from support.ecosystem import ecosystem_crds
from support.foreign_changes import Change, at, changes
from support.services import MINIMAL_SPEC, document, merged

SAMPLES = sorted(path.name for path in sample_path("quickstart.yaml").parent.glob("*.yaml"))
SETTINGS = PlanSettings(
    monitoring_from=({"namespaceSelector": {"matchLabels": {"name": "monitoring"}}},),
    operator_namespace="flowprefill-system",
    image_pull_secrets=("registry",),
)
INTRUDER = "intruder"
_numbers = itertools.count(1)
AT_ONCE = 16


def pod_template(container: str) -> dict[str, Any]:
    """A list or map of every type that a pod has, besides what is planned anyway."""
    return {
        "metadata": {"labels": {"team": "red"}, "annotations": {"note": "mine"}},
        "spec": {
            "nodeSelector": {"zone": "a"},
            "affinity": {},
            "readinessGates": [],
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["one", "two"]}],
            "containers": [
                {
                    "name": container,
                    "env": [{"name": "EXTRA", "value": "1"}, {"name": "EMPTY", "value": ""}],
                    "envFrom": [{"configMapRef": {"name": "more"}}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                },
                {
                    "name": "sidecar",
                    "image": "sidecar:1",
                    "ports": [{"containerPort": 1234}],
                    "resources": {},
                    "securityContext": {"capabilities": {"drop": ["ALL"]}},
                },
            ],
        },
    }


EVERYTHING: dict[str, Any] = {
    "model": {
        "uri": "hf://org/name",
        "secretRef": {"name": "hub", "key": "token"},
        "cache": {"persistentVolumeClaim": {"storage": "1Gi", "retain": False}},
    },
    "scheduling": {"predictor": {"profilingJob": True}},
    "observability": {"monitorLabels": {"release": "prometheus"}},
    "security": {"apiKeysSecretRef": {"name": "keys"}},
    # The profiling Job, whose pod is like a prefill pod.
    "prefill": {
        "autoscaling": {
            "maxReplicas": 3,
            "provider": "Keda",
            "prometheusAddress": "http://p.monitoring:9090",
        },
        "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}, "limits": {"memory": "2Gi"}},
        "podTemplate": pod_template("prefill"),
    },
    "decode": {
        "autoscaling": {"minReplicas": 2, "maxReplicas": 3},
        "resources": {"requests": {"cpu": "1"}},
        "podTemplate": pod_template("decode"),
    },
    "proxy": {
        "replicas": 2,
        "podTemplate": pod_template("proxy"),
        "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
    },
}
"""A service that asks for every kind of object and for what lists and maps a pod may have."""


@dataclass(frozen=True, slots=True)
class Place:
    """A service in a namespace of its own."""

    plane: ControlPlane
    cluster: Cluster
    api: Any
    service: FlowPrefillService

    @property
    def namespace(self) -> str:
        return self.service.metadata.namespace

    def kubectl(self, *args: str) -> None:
        self.plane.kubectl(*args, "-n", self.namespace, stdin=json.dumps(APPLIED_BY_SOMEBODY))

    async def known(self) -> Store:
        """What an operator that has just started knows."""
        store = Store(lambda _: None)
        for kind in OWNED:
            items, version = await self.cluster.list(
                kind, namespace=self.namespace, labels="flowprefill.io/service"
            )
            store.replace(kind, items, version, namespace=self.namespace)
        return store

    async def apply(self) -> tuple[Goal, Applied]:
        """One pass of an operator that has just started."""
        store = await self.known()
        label = self.service.metadata.name
        decided = goal(self.service, SETTINGS, store.of((self.namespace, label)), frozenset())
        applier = Applier(self.cluster, store, served=lambda _: True)
        done = await applier.bring_about(
            decided, namespace=self.namespace, label=label, uid=self.service.metadata.uid
        )
        assert not done.failures, done.failures
        return decided, done

    async def settled(self) -> list[dict[str, Any]]:
        """All objects, once they are there and autoscalers own the number of their pods."""
        await self.apply()
        decided, _ = await self.apply()
        assert not decided.hand_over or not (await self.apply())[0].hand_over
        return [dict(item) for step in decided.steps for item in step]

    async def live(self, item: dict[str, Any]) -> dict[str, Any]:
        kind, name = key_of(item)
        found = await self.cluster.get(kind, self.namespace, name)
        assert found is not None
        return found

    async def tried(self, item: dict[str, Any], change: Change) -> dict[str, Any] | None:
        """The object as it would be after somebody's change; None when the server refuses it."""
        kind, name = key_of(item)
        prepared = await self.api.param_serialize(
            "PATCH",
            kind.path(self.namespace, name),
            query_params=[("fieldManager", INTRUDER), ("dryRun", "All")],
            header_params={"Accept": "application/json", "Content-Type": "application/json-patch+json"},
            body=change.patch(),
            auth_settings=["BearerToken"],
        )
        answer = await self.api.call_api(*prepared)
        body = json.loads(await answer.read())
        return body if answer.status == 200 else None


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    for file in (ROOT / "crds" / f"{CRD_NAME}.yaml", *ecosystem_crds()):
        control_plane.kubectl("apply", "--server-side", "-f", str(file))
        control_plane.until_done("wait", "--for=condition=Established", "--timeout=60s", "-f", str(file))
    for plural in ("flowprefillservices", "scaledobjects", "podmonitors", "httproutes"):
        control_plane.until_done("get", plural)
    return control_plane


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[tuple[Cluster, Any]]:
    configuration = Configuration()
    await kube_config.load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
    async with connected(Credentials(configuration=configuration, namespace=None)) as found:
        yield found


@pytest.fixture
def namespaces(plane: ControlPlane) -> Iterator[list[str]]:
    made: list[str] = []
    yield made
    for name in made:
        plane.kubectl("delete", "namespace", name, "--wait=false")


def placed(
    plane: ControlPlane, client: tuple[Cluster, Any], namespaces: list[str], body: dict[str, Any]
) -> Place:
    name = f"ownership-{next(_numbers)}"
    plane.kubectl("create", "namespace", name)
    namespaces.append(name)
    plane.kubectl("apply", "--server-side", "-n", name, "-f", "-", stdin=json.dumps(body))
    stored = plane.get("fps", body["metadata"]["name"], "-n", name)
    return Place(plane, *client, parse_service(stored))


def sample_body(name: str) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(sample_path(name).read_text())
    return body


@pytest.fixture
def everything(plane: ControlPlane, client: tuple[Cluster, Any], namespaces: list[str]) -> Place:
    return placed(plane, client, namespaces, document(merged(MINIMAL_SPEC, EVERYTHING), name="everything"))


KEPT_UP = {kind.kind for kind in OWNED} - {"Job"}
"""What every pass looks at again. A Job runs to its end as it was made."""


def unchanged(live: dict[str, Any], item: dict[str, Any]) -> bool:
    fields = applied_fields(live, MANAGER)
    return fields is not None and covers(fields, item)


@pytest.mark.parametrize("sample", SAMPLES)
async def test_a_new_operator_writes_nothing_where_an_earlier_one_has_applied_a_sample(
    plane: ControlPlane, client: tuple[Cluster, Any], namespaces: list[str], sample: str
) -> None:
    place = placed(plane, client, namespaces, sample_body(sample))
    for item in await place.settled():
        live = await place.live(item)
        assert unchanged(live, item), json.dumps([item, live["metadata"]["managedFields"]])
    _, again = await place.apply()
    assert again.writes == 0


async def test_every_kind_is_unchanged_after_it_was_applied(everything: Place) -> None:
    planned = await everything.settled()
    assert {str(item["kind"]) for item in planned} == KEPT_UP
    for item in planned:
        live = await everything.live(item)
        assert unchanged(live, item), json.dumps([item, live["metadata"]["managedFields"]])
    _, again = await everything.apply()
    assert again.writes == 0


async def test_no_change_of_a_field_that_is_set_goes_unnoticed(everything: Place) -> None:
    """Of the largest object of each kind every scalar gets another value, and every field and list item is taken out, one
    at a time, in dry runs. Where the server lets that happen and the value is another one afterwards, it must show."""
    planned = await everything.settled()
    places = asyncio.Semaphore(AT_ONCE)
    unnoticed: list[str] = []
    seen: Counter[str] = Counter()

    async def one(item: dict[str, Any], live: dict[str, Any], change: Change) -> None:
        async with places:
            after = await everything.tried(item, change)
        if after is None or at(after, change.path) == at(live, change.path):
            return
        seen[str(item["kind"])] += 1
        if unchanged(after, item):
            unnoticed.append(f"{item['kind']} {item['metadata']['name']}: {change}")

    work = []
    largest: dict[str, dict[str, Any]] = {}
    for item in sorted(planned, key=lambda item: len(json.dumps(item))):
        if not item.get("immutable"):
            largest[item["kind"]] = item
    for kind, item in largest.items():
        live = await everything.live(item)
        # The server lets nobody change what a record holds.
        changed = {**item, "data": {}} if kind == "ControllerRevision" else item
        work += [one(item, live, change) for change in changes(changed)]
    await asyncio.gather(*work)
    assert unnoticed == []
    assert set(seen) == KEPT_UP
    assert seen["Deployment"] > 300, seen


async def test_additions_that_are_not_ours_are_no_change(everything: Place) -> None:
    for item in await everything.settled():
        for field in ("labels", "annotations"):
            if field not in (await everything.live(item))["metadata"]:
                continue
            change = Change(path=("metadata", field, "theirs"), operation="add", value="1")
            after = await everything.tried(item, change)
            assert after is not None
            assert unchanged(after, item), f"{item['kind']} {change}"


async def test_a_volume_that_was_given_another_source_is_noticed(everything: Place) -> None:
    """The planned source, `emptyDir: {}`, sets no field below itself that could be missed."""
    deployment = next(
        i
        for i in await everything.settled()
        if i["kind"] == "Deployment" and "decode" in i["metadata"]["name"]
    )
    path = ("spec", "template", "spec", "volumes")
    number = next(n for n, v in enumerate(at(deployment, path)) if v.get("emptyDir") == {})
    volume = {"name": at(deployment, path)[number]["name"], "configMap": {"name": "theirs"}}
    after = await everything.tried(
        deployment, Change(path=(*path, number), operation="replace", value=volume)
    )
    assert after is not None
    assert not unchanged(after, deployment)


DRIFT: dict[str, tuple[str, ...]] = {
    "a label is removed": ("label", "deployment", "everything-proxy", "app.kubernetes.io/part-of-"),
    "a label gets another value": (
        "label",
        "--overwrite",
        "svc",
        "everything-proxy",
        "flowprefill.io/role=x",
    ),
    "an environment variable is removed": ("set", "env", "deployment/everything-proxy", "EXTRA-"),
    "an environment variable gets another value": ("set", "env", "deployment/everything-proxy", "EXTRA=2"),
    "another image": ("set", "image", "deployment/everything-proxy", "proxy=other:1"),
    "another number of pods": ("scale", "deployment", "everything-proxy", "--replicas=5"),
    "another data value": ("patch", "cm", "everything-live", "-p", '{"data":{"live.json":"{}"}}'),
    "the data is gone": ("patch", "cm", "everything-live", "--type=merge", "-p", '{"data":null}'),
    "an access rule is widened": (
        *("patch", "role", "everything-proxy", "--type=json", "-p"),
        '[{"op":"replace","path":"/rules/0/verbs","value":["*"]}]',
    ),
    "an item of a list gets another key": (
        *("patch", "svc", "everything-proxy", "--type=json", "-p"),
        '[{"op":"replace","path":"/spec/ports/0/port","value":1}]',
    ),
    "a policy is opened": ("patch", "netpol", "everything-workers", "-p", '{"spec":{"ingress":[{}]}}'),
    "a budget is widened": ("patch", "pdb", "everything-proxy", "-p", '{"spec":{"maxUnavailable":2}}'),
    "an autoscaler is pointed elsewhere": (
        *("patch", "hpa", "everything-decode", "--type=merge", "-p"),
        '{"spec":{"scaleTargetRef":{"name":"other"}}}',
    ),
    "another project's object is changed": (
        *("patch", "scaledobject", "everything-prefill", "--type=merge", "-p"),
        '{"spec":{"maxReplicaCount":99}}',
    ),
    "somebody applies it with force": ("apply", "--server-side", "--force-conflicts", "-f", "-"),
}
APPLIED_BY_SOMEBODY = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "everything-proxy"},
    "spec": {"selector": {"app": "theirs"}},
}

NOT_OURS: dict[str, tuple[str, ...]] = {
    "an annotation": ("annotate", "deployment", "everything-proxy", "theirs=1"),
    "a label": ("label", "svc", "everything-proxy", "theirs=1"),
    "an annotation of the pods": ("rollout", "restart", "deployment", "everything-proxy"),
    "the number of pods that an autoscaler owns": (
        "scale",
        "deployment",
        "-l",
        "flowprefill.io/role=decode",
        "--replicas=3",
    ),
    "a status": (
        *("patch", "deployment", "everything-proxy", "--subresource=status", "--type=merge", "-p"),
        '{"status":{"collisionCount":7}}',
    ),
    "a field that is left out": (
        "patch",
        "deployment",
        "everything-proxy",
        "-p",
        '{"spec":{"minReadySeconds":1}}',
    ),
}


async def test_what_others_change_is_mended_once_and_their_own_fields_are_left(everything: Place) -> None:
    await everything.settled()
    for what, command in NOT_OURS.items():
        everything.kubectl(*command)
        assert (await everything.apply())[1].writes == 0, what
    for what, command in DRIFT.items():
        everything.kubectl(*command)
        assert (await everything.apply())[1].writes == 1, what
        assert (await everything.apply())[1].writes == 0, what
    scaled = everything.plane.get(
        "deployment", "-l", "flowprefill.io/role=decode", "-n", everything.namespace
    )
    assert [d["spec"]["replicas"] for d in scaled["items"]] == [3]
