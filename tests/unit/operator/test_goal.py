"""What the goal of a service does besides replacing its pods: numbers of pods, profiles, claims, live changes, upgrades,
records; and that the same end is reached from anywhere."""

from __future__ import annotations

import json

import pytest

from flowprefill_operator.kinds import CLAIMS, CONFIG_MAPS, DEPLOYMENTS, JOBS, RECORDS, kind_of
from flowprefill_operator.revisions import KEPT, key_of
from support.cluster_objects import pod_status, running
from support.rollouts import (
    AUTOSCALED,
    COLOCATED,
    EVENTS,
    HF,
    OTHER,
    PROFILED,
    RECREATE,
    SEEDS,
    THIRD,
    TWO,
    always_serves,
    assert_rolled,
    objects,
    settled,
    spec,
)
from support.services import Spec
from support.simulated_cluster import SimulatedCluster, with_images


@pytest.mark.parametrize("seed", SEEDS)
def test_handing_three_pods_over_to_an_autoscaler_never_has_fewer(seed: int) -> None:
    cluster, revision = settled(seed, {"prefill": {"replicas": 3}})
    assert cluster.ask(AUTOSCALED) == revision

    def check(cluster: SimulatedCluster) -> None:
        assert cluster.replicas("prefill", revision) == 3
        assert len(cluster.running("prefill")) >= 3

    cluster.watchers.append(check)
    cluster.steps(EVENTS)
    assert_rolled(cluster, revision)
    cluster.watchers.clear()
    cluster.scale("prefill", revision, 5)
    assert_rolled(cluster, revision)
    assert cluster.replicas("prefill", revision) == 5


@pytest.mark.parametrize(("pods", "left"), [(1, 3), (4, 4), (9, 5)])
def test_pods_are_handed_over_within_the_bounds_of_the_autoscaler(pods: int, left: int) -> None:
    """Which may not be there: nobody else would bring them to its minimum."""
    cluster, revision = settled(1, {"prefill": {"replicas": pods}})
    cluster.ask({"prefill": {"autoscaling": {"minReplicas": 3, "maxReplicas": 5}}})
    assert_rolled(cluster, revision)
    assert cluster.replicas("prefill", revision) == left


@pytest.mark.parametrize("seed", SEEDS)
def test_a_number_of_pods_that_is_asked_for_again_is_taken_back_from_the_autoscaler(seed: int) -> None:
    cluster, revision = settled(seed, AUTOSCALED)
    cluster.scale("prefill", revision, 4)
    cluster.ask({"prefill": {"replicas": 2}})
    cluster.steps(EVENTS)
    assert_rolled(cluster, revision)
    assert cluster.replicas("prefill", revision) == 2
    assert cluster.scale_targets() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_revision_starts_with_as_many_pods_as_an_autoscaler_gave_the_old_one(seed: int) -> None:
    cluster, old = settled(seed, AUTOSCALED)
    cluster.scale("prefill", old, 4)
    cluster.settle()
    new = cluster.ask(spec(AUTOSCALED, OTHER))
    (target,) = cluster.scale_targets()
    assert target.endswith(old)

    def check(cluster: SimulatedCluster) -> None:
        assert cluster.replicas("prefill", new) in (None, 4)
        assert cluster.replicas("prefill", old) in (None, 4)
        (target,) = cluster.scale_targets()
        if target.endswith(new):
            assert cluster.complete(new)
            assert new in cluster.proven, "the autoscaler moves before the new revision serves"

    cluster.watchers.append(check)
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)
    assert cluster.scale_targets()[0].endswith(new)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_pods_wait_for_the_profile_and_those_that_run_stay(seed: int) -> None:
    cluster = SimulatedCluster(seed)
    cluster.healthy = False
    revision = cluster.ask(PROFILED)
    cluster.steps(EVENTS)
    goal = cluster.settle()
    assert (goal.unprofiled, goal.waits_for) == (True, "the profiling Job")
    assert cluster.deployment("prefill") is None
    assert cluster.deployment("decode") is not None
    cluster.healthy = True
    assert_rolled(cluster, revision)
    assert [kind for kind, _ in cluster.objects if kind == JOBS] == []
    (profile,) = [
        i for (k, n), i in cluster.objects.items() if k == CONFIG_MAPS and n.startswith("example-profile-")
    ]
    assert list(profile["data"].values()) == [cluster.profile]
    # Somebody deletes the profile: the Job runs again, and prefill pods serve on.
    cluster.healthy = False
    cluster.lose(key_of(profile))
    cluster.watchers.append(always_serves(revision))
    cluster.steps(EVENTS)
    assert cluster.settle().unprofiled
    cluster.healthy = True
    assert_rolled(cluster, revision)


def test_a_profile_serves_every_revision_that_it_holds_for() -> None:
    cluster, _ = settled(1, PROFILED)
    new = cluster.ask(spec(PROFILED, {"decode": {"maxBatchSize": 7}}))
    cluster.watchers.append(lambda c: _no_job(c))
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)


def _no_job(cluster: SimulatedCluster) -> None:
    assert [name for kind, name in cluster.objects if kind == JOBS] == []


def test_clients_keep_the_port_of_the_proxies_that_serve_until_those_are_replaced() -> None:
    cluster, _ = settled(1)

    def ways() -> tuple[int, str | None]:
        named = ("Service", "example-proxy")
        (service,) = [body for (kind, name), body in cluster.objects.items() if (kind.kind, name) == named]
        return service["spec"]["ports"][0]["port"], cluster.goal().url

    before = ways()
    assert before == (8000, "http://example-proxy.ns.svc:8000/v1")
    new = cluster.ask({"proxy": {"portApi": 8100}, "engine": {"blockSize": 32}})
    cluster.sick.add(new)
    cluster.settle()
    assert ways() == before
    cluster.sick.clear()
    cluster.settle()
    assert ways() == (8100, "http://example-proxy.ns.svc:8100/v1")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_old_revision_serves_until_a_proxy_of_the_new_one_is_ready(seed: int) -> None:
    cluster, old = settled(seed)
    seen: set[str | None] = set()

    def check(cluster: SimulatedCluster) -> None:
        goal = cluster.goal()
        seen.add(goal.serving)
        told = {pod["metadata"]["labels"]["flowprefill.io/revision"] for pod in cluster.running("proxy")}
        if goal.serving == new and cluster.serves(old):
            assert new in told

    new = cluster.ask(OTHER)
    cluster.watchers.append(check)
    cluster.settle()
    assert {old, new} <= seen


def test_a_revision_that_never_served_makes_way_at_once_for_a_corrected_one() -> None:
    """It may hold what the corrected one needs."""
    cluster = SimulatedCluster(1)
    wrong = cluster.ask()
    cluster.sick.add(wrong)
    cluster.settle()
    assert cluster.members("prefill", wrong)
    right = cluster.ask(OTHER)
    assert cluster.goal().previous is None
    cluster.settle()
    assert cluster.members("prefill", wrong) == []
    assert cluster.serves(right)


def test_a_revision_of_which_nothing_has_started_takes_another_image_and_one_that_runs_does_not() -> None:
    cluster = SimulatedCluster(1)
    wrong = cluster.ask()
    cluster.sick.add(wrong)
    cluster.settle()
    for pod in cluster.pods.values():
        pod["status"] = {"phase": "Pending"}
    cluster.hear()
    cluster.settings = with_images(cluster.settings, "corrected")
    mended = cluster.goal().target
    assert (mended.name == wrong, mended.upgrade) == (False, None)
    one = next(iter(cluster.pods.values()))
    one["status"] = pod_status(running(), phase="Running")
    cluster.hear()
    kept = cluster.goal().target
    assert kept.name == wrong
    assert kept.upgrade is not None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_revision_of_which_a_role_has_no_deployment_does_not_serve(role: str) -> None:
    cluster, revision = settled(1)
    assert cluster.goal().serving == revision
    cluster.lose(key_of(cluster.deployment(role, revision) or {}))
    assert cluster.goal().serving is None
    assert not cluster.goal().to_prove


@pytest.mark.parametrize("retain", [True, False])
def test_a_claim_that_is_to_be_retained_is_never_pruned_and_another_goes_with_its_use(retain: bool) -> None:
    cache = {"persistentVolumeClaim": {"storage": "1Gi", "retain": retain}}
    cluster, _ = settled(1, {"model": {"uri": "hf://org/name", "cache": cache}})
    claim = (CLAIMS, "example-model-cache")
    assert claim in cluster.objects
    new = cluster.ask()
    cluster.settle()
    assert cluster.serves(new)
    assert (claim in cluster.objects) == retain


def test_a_live_change_touches_the_live_document_alone_and_an_equal_one_keeps_its_generation() -> None:
    cluster, revision = settled(1)
    before = {key: json.dumps(item) for key, item in cluster.objects.items()}
    assert cluster.ask({"scheduling": {"policy": "edf"}}) == revision
    cluster.settle()
    changed = [key for key, item in cluster.objects.items() if json.dumps(item) != before[key]]
    assert changed == [(CONFIG_MAPS, "example-live")]
    document = json.loads(cluster.objects[changed[0]]["data"]["live.json"])
    assert (document["policy"], document["generation"]) == ("edf", 2)
    # Generation 3 changes nothing that pods follow.
    cluster.ask({"scheduling": {"policy": "edf"}, "upgradePolicy": "Automatic"})
    cluster.settle()
    assert json.loads(cluster.objects[changed[0]]["data"]["live.json"])["generation"] == 2


def test_an_upgrade_under_manual_changes_no_pod_and_names_the_image() -> None:
    cluster, revision = settled(1, TWO)
    before = {key: json.dumps(item) for key, item in cluster.objects.items()}
    cluster.settings = with_images(cluster.settings, "2.0")
    goal = cluster.settle()
    assert (goal.target.name, goal.previous) == (revision, None)
    assert goal.target.upgrade == "registry.example/torch:2.0, registry.example/proxy:2.0"
    assert {key: json.dumps(item) for key, item in cluster.objects.items()} == before


@pytest.mark.parametrize("seed", SEEDS)
def test_an_upgrade_under_automatic_is_a_rollout_of_its_own(seed: int) -> None:
    automatic: Spec = {"upgradePolicy": "Automatic"}
    cluster, old = settled(seed, TWO, automatic)
    cluster.settings = with_images(cluster.settings, "2.0")
    new = cluster.goal().target.name
    assert new != old
    cluster.watchers.append(always_serves(old, new))
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)
    assert {
        container["image"]
        for item in cluster.of_revision(new)
        if kind_of(item) == DEPLOYMENTS
        for container in item["spec"]["template"]["spec"]["containers"]
    } == {"registry.example/torch:2.0", "registry.example/proxy:2.0"}


def test_the_latest_records_are_kept_and_no_others() -> None:
    cluster, _ = settled(1)
    names = [cluster.ask({"engine": {"kvCacheTokens": 1024 * n}}) for n in range(4, 10) if cluster.settle()]
    cluster.settle()
    records = cluster.records()
    assert sorted(records, key=records.__getitem__) == names[-KEPT - 1 :]
    assert sorted(records.values()) == list(range(len(names) - KEPT + 1, len(names) + 2))


def test_records_do_not_change_with_use() -> None:
    """Their data cannot be changed once written."""
    cluster, old = settled(1, TWO)
    first = json.dumps(cluster.objects[RECORDS, f"example-{old}"]["data"])
    for changes in (spec(TWO, OTHER), spec(TWO, {"rollout": {"timeoutSeconds": 4000}}), TWO):
        cluster.ask(changes)
        cluster.settle()
        assert json.dumps(cluster.objects[RECORDS, f"example-{old}"]["data"]) == first


@pytest.mark.parametrize("seed", SEEDS)
def test_from_any_state_the_same_end_is_reached(seed: int) -> None:
    """Specs come at any moment, some revisions are sick, objects are deleted, the operator dies: in the end there is what
    there would be in a cluster that was asked for the last spec alone."""
    cluster = SimulatedCluster(seed)
    rng = cluster.rng
    choices = (TWO, spec(TWO, OTHER), THIRD, COLOCATED, spec(OTHER, RECREATE), AUTOSCALED, PROFILED, HF)
    for _ in range(rng.randint(2, 6)):
        revision = cluster.ask(rng.choice(choices))
        if rng.random() < 0.4:
            cluster.sick.add(revision)
        cluster.steps(rng.randint(0, 150))
        if rng.random() < 0.15:
            cluster.prune_everything_but_records()
    cluster.sick.clear()
    last = cluster.ask(rng.choice(choices))
    assert_rolled(cluster, last)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_observations_lead_to_the_same_goal(seed: int) -> None:
    cluster = SimulatedCluster(seed)
    cluster.ask(TWO)
    cluster.steps(60)
    cluster.ask(spec(TWO, OTHER))
    for _ in range(60):
        cluster.step()
        first, second = cluster.goal(), cluster.goal()
        assert first == second
        assert json.dumps(objects(first)) == json.dumps(objects(second))
