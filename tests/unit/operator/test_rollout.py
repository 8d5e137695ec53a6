"""Rollouts, step by step in a simulated cluster whose events come in any order, and whose operator dies at any write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_operator.kinds import CLAIMS, CONFIG_MAPS, DEPLOYMENTS, JOBS, RECORDS, kind_of
from flowprefill_operator.resources.base import Object
from flowprefill_operator.revisions import KEPT, key_of
from flowprefill_operator.rollout import Goal
from flowprefill_operator.settings import PlanSettings
from support.services import Spec, merged
from support.simulated_cluster import SimulatedCluster, with_images

SEEDS = range(3)
EVENTS = 250
"""Of a rollout; enough that most are over by then, and few are not."""

TWO: Spec = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "proxy": {"replicas": 2}}
OTHER: Spec = {"engine": {"kvCacheTokens": 4096}}
THIRD: Spec = {"engine": {"kvCacheTokens": 8192}}
RECREATE: Spec = {"rollout": {"strategy": "Recreate"}}
COLOCATED: Spec = {"mode": "Colocated"}
HF: Spec = {"model": {"uri": "hf://org/name", "cache": {"persistentVolumeClaim": {"storage": "1Gi"}}}}
PROFILED: Spec = {"scheduling": {"predictor": {"profilingJob": True}}}


def spec(*parts: Spec) -> Spec:
    found: Spec = {}
    for part in parts:
        found = merged(found, part)
    return found


def settled(seed: int, *parts: Spec, settings: PlanSettings | None = None) -> tuple[SimulatedCluster, str]:
    """A cluster in which one revision serves."""
    cluster = SimulatedCluster(seed, settings=settings)
    revision = cluster.ask(spec(*parts))
    cluster.settle()
    assert cluster.serves(revision)
    assert revision in cluster.proven
    return cluster, revision


def objects(goal: Goal) -> list[Object]:
    return [item for step in goal.steps for item in step]


def snapshot(cluster: SimulatedCluster, revision: str) -> str:
    """A revision's objects as they were asked for, and its pods."""
    asked = [{**item, "status": None} for item in cluster.of_revision(revision)]
    pods = sorted(pod["metadata"]["name"] for pod in cluster.pods.values())
    return json.dumps([sorted(asked, key=lambda item: str(key_of(item))), pods], sort_keys=True)


def always_serves(*revisions: str) -> Any:
    """A watcher: one of the revisions has all its roles, and a proxy is ready."""

    def check(cluster: SimulatedCluster) -> None:
        assert any(cluster.serves(revision) for revision in revisions), "nothing serves"
        assert cluster.running("proxy"), "no proxy is ready"

    return check


def workers_outlive_proxies(revision: str) -> Any:
    """A watcher: while a proxy of the revision is left, which prefers its workers, they are."""

    def check(cluster: SimulatedCluster) -> None:
        if cluster.deployment("prefill", revision) is None or cluster.deployment("decode", revision) is None:
            assert not cluster.members("proxy", revision), "workers go before their proxies"

    return check


def assert_rolled(cluster: SimulatedCluster, revision: str) -> None:
    """Nothing but this revision is left, and nothing is left to do."""
    goal = cluster.settle()
    assert (goal.target.name, goal.serving, goal.previous) == (revision, revision, None)
    assert (goal.prune, dict(goal.hand_over), goal.to_prove) == ((), {}, False)
    assert cluster.complete(revision)
    assert {r for (k, _), i in cluster.objects.items() if k != RECORDS and (r := _revision(i))} == {revision}
    assert {_revision(pod) for pod in cluster.pods.values()} == {revision}
    planned = {key_of(item) for item in objects(goal)}
    left = {key for key in cluster.objects if key[0] != RECORDS} - planned
    assert left <= {(CLAIMS, "example-model-cache")}, "a claim that is retained is the user's"
    assert objects(cluster.goal()) == objects(goal)


def _revision(item: dict[str, Any]) -> str:
    return str(item["metadata"]["labels"].get("flowprefill.io/revision", ""))


CHANGES: dict[str, tuple[Spec, Spec]] = {
    "another engine setting": (TWO, spec(TWO, OTHER)),
    "another number of pods too": (TWO, spec(TWO, OTHER, {"prefill": {"replicas": 3}})),
    "one pod of each": ({}, OTHER),
    "from two roles to one": (TWO, spec(COLOCATED, {"prefill": {"replicas": 2}})),
    "from one role to two": (COLOCATED, TWO),
    "autoscaled": (
        {"prefill": {"autoscaling": {"minReplicas": 2, "maxReplicas": 5}}},
        spec(OTHER, {"prefill": {"autoscaling": {"minReplicas": 2, "maxReplicas": 5}}}),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_surge_rollout_serves_at_every_moment_and_ends_with_the_new_revision_alone(
    change: str, seed: int
) -> None:
    before, after = CHANGES[change]
    cluster, old = settled(seed, before)
    new = cluster.ask(after)
    assert new != old
    cluster.watchers.append(always_serves(old, new))
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)


@pytest.mark.parametrize("seed", SEEDS)
def test_proxies_are_replaced_when_the_new_workers_are_complete_and_the_old_go_last_of_all(seed: int) -> None:
    cluster, old = settled(seed, TWO)
    new = cluster.ask(spec(TWO, OTHER))
    once_complete: list[bool] = []

    def check(cluster: SimulatedCluster) -> None:
        once_complete.append(cluster.complete(new))
        proxy = cluster.deployment("proxy")
        assert proxy is not None
        if _revision(proxy) == new:
            assert any(once_complete), "proxies are replaced before the new workers are there"
        for role in ("prefill", "decode"):
            if cluster.deployment(role, old) is None:
                assert new in cluster.proven, "the old revision goes before the new one has served"
                assert not cluster.members("proxy", old), "the old revision goes before its proxies"
            else:
                assert cluster.replicas(role, old) == 2

    cluster.watchers.append(check)
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_revision_that_never_gets_ready_leaves_the_old_one_as_it_is(seed: int) -> None:
    cluster, old = settled(seed, TWO, HF)
    before = snapshot(cluster, old)
    new = cluster.ask(spec(TWO, OTHER))
    cluster.sick.add(new)
    cluster.steps(EVENTS)
    goal = cluster.settle()
    assert (goal.target.name, goal.serving, goal.previous, goal.to_prove) == (new, old, old, False)
    assert cluster.deployment("prefill", new) is not None
    added = {pod["metadata"]["name"] for pod in cluster.pods.values() if _revision(pod) == new}
    for name in added:
        del cluster.pods[name]
    assert snapshot(cluster, old) == before


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_pods_of_the_old_revision_mount_stays_until_they_are_gone(seed: int) -> None:
    """A claim or profile that the new revision has no use for, and that a restarted pod of the old one needs."""
    cache = {"persistentVolumeClaim": {"storage": "1Gi", "retain": False}}
    cluster, old = settled(seed, TWO, PROFILED, {"model": {"uri": "hf://org/name", "cache": cache}})
    new = cluster.ask(TWO)

    def check(cluster: SimulatedCluster) -> None:
        for item in cluster.of_revision(old):
            if kind_of(item) != DEPLOYMENTS or item["spec"]["replicas"] == 0:
                continue
            for volume in item["spec"]["template"]["spec"]["volumes"]:
                if "configMap" in volume:
                    assert (CONFIG_MAPS, volume["configMap"]["name"]) in cluster.objects, volume
                if "persistentVolumeClaim" in volume:
                    assert (CLAIMS, volume["persistentVolumeClaim"]["claimName"]) in cluster.objects, volume

    cluster.watchers.append(check)
    cluster.sick.add(new)
    cluster.settle()
    cluster.sick.clear()
    cluster.steps(EVENTS)
    cluster.watchers.clear()
    assert_rolled(cluster, new)


@pytest.mark.parametrize("seed", SEEDS)
def test_going_back_renders_the_first_revision_as_it_was_whatever_the_operator_would_render_now(
    seed: int,
) -> None:
    cluster, old = settled(seed, TWO)
    first = {key_of(i): i["spec"]["template"] for i in cluster.of_revision(old) if kind_of(i) == DEPLOYMENTS}
    new = cluster.ask(spec(TWO, OTHER))
    assert_rolled(cluster, new)
    cluster.settings = with_images(PlanSettings(image_pull_policy="Always"), "2.0")
    assert cluster.ask(TWO) == old
    cluster.watchers.append(always_serves(old, new))
    cluster.steps(EVENTS)
    assert_rolled(cluster, old)
    again = {key_of(i): i["spec"]["template"] for i in cluster.of_revision(old) if kind_of(i) == DEPLOYMENTS}
    assert again == first
    assert max(cluster.records(), key=lambda name: cluster.records()[name]) == old


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("after", [0, 20, 60, 120], ids=lambda after: f"after {after} events")
def test_going_back_at_any_moment_of_a_rollout_serves_all_the_while(after: int, seed: int) -> None:
    cluster, old = settled(seed, TWO)
    new = cluster.ask(spec(TWO, OTHER))
    cluster.watchers.append(always_serves(old, new))
    cluster.steps(after)
    assert cluster.ask(TWO) == old
    cluster.watchers.append(workers_outlive_proxies(new))
    cluster.steps(EVENTS)
    assert_rolled(cluster, old)


@pytest.mark.parametrize("seed", SEEDS)
def test_going_back_when_only_the_proof_was_missing_replaces_proxies_before_workers_go(seed: int) -> None:
    cluster, old = settled(seed, TWO)
    new = cluster.ask(spec(TWO, OTHER))
    cluster.mute.add(new)
    cluster.settle()
    assert cluster.running("proxy", new)
    assert cluster.ask(TWO) == old
    cluster.watchers += [always_serves(old, new), workers_outlive_proxies(new)]
    cluster.steps(EVENTS)
    assert_rolled(cluster, old)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_third_revision_takes_the_place_of_a_stuck_second_while_the_first_serves(seed: int) -> None:
    cluster, first = settled(seed, TWO)
    stuck = cluster.ask(spec(TWO, OTHER))
    cluster.sick.add(stuck)
    cluster.watchers.append(always_serves(first))
    cluster.settle()
    cluster.watchers.clear()
    third = cluster.ask(spec(TWO, THIRD))
    cluster.sick.add(third)
    cluster.watchers.append(always_serves(first))
    cluster.steps(EVENTS)
    goal = cluster.settle()
    assert goal.previous == first
    assert cluster.of_revision(stuck) == []
    assert cluster.complete(first)
    cluster.sick.clear()
    cluster.watchers[:] = [always_serves(first, third)]
    cluster.steps(EVENTS)
    assert_rolled(cluster, third)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("after", [10, 40, 80, 120, 160], ids=lambda after: f"after {after} events")
def test_a_change_at_any_moment_of_a_rollout_never_takes_a_proven_revision_for_an_unproven_one(
    after: int, seed: int
) -> None:
    cluster, first = settled(seed, TWO)
    second = cluster.ask(spec(TWO, OTHER))
    cluster.steps(after)
    third = cluster.ask(spec(TWO, THIRD))

    def check(cluster: SimulatedCluster) -> None:
        present = [name for name in (first, second, third) if cluster.of_revision(name)]
        assert any(cluster.serves(name) and name in cluster.proven for name in present), (
            "no proven one serves"
        )

    cluster.watchers.append(check)
    cluster.steps(EVENTS)
    assert_rolled(cluster, third)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_revision_that_is_ready_and_serves_no_token_does_not_take_the_place_of_one_that_did(
    seed: int,
) -> None:
    cluster, first = settled(seed, TWO)
    mute = cluster.ask(spec(TWO, OTHER))
    cluster.mute.add(mute)
    cluster.watchers.append(always_serves(first))
    cluster.steps(EVENTS)
    assert cluster.settle().previous == first
    third = cluster.ask(spec(TWO, THIRD))
    cluster.sick.add(third)
    cluster.steps(EVENTS)
    assert cluster.settle().previous == first
    assert cluster.complete(first)


def test_a_proven_revision_whose_pods_restart_is_not_given_up_for_one_that_never_served() -> None:
    cluster, first = settled(1, TWO)
    mute = cluster.ask(spec(TWO, OTHER))
    cluster.mute.add(mute)
    cluster.settle()
    cluster.sick.add(first)
    cluster.restart("prefill", first)
    third = cluster.ask(spec(TWO, THIRD))
    cluster.sick.add(third)
    cluster.steps(EVENTS)
    assert not cluster.serves(first)
    assert cluster.settle().previous == first
    cluster.sick.remove(first)
    cluster.settle()
    assert cluster.complete(first)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "change", ["another engine setting", "from two roles to one", "from one role to two"]
)
def test_recreate_never_has_worker_pods_of_two_revisions(change: str, seed: int) -> None:
    before, after = (spec(part, RECREATE) for part in CHANGES[change])
    cluster = SimulatedCluster(seed)
    old = cluster.ask(before)
    cluster.steps(seed * 10)

    def check(cluster: SimulatedCluster) -> None:
        roles = ("prefill", "decode", "colocated")
        found = {_revision(pod) for role in roles for pod in cluster.members(role)}
        assert len(found) <= 1, f"worker pods of {found}"

    cluster.watchers.append(check)
    new = cluster.ask(after)
    assert new != old
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)


AUTOSCALED: Spec = {"prefill": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}}


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
def test_a_role_without_pods_is_no_reason_to_wait_for_a_token_that_cannot_be_served(seed: int) -> None:
    cluster, old = settled(seed, TWO)
    new = cluster.ask(spec(TWO, OTHER, {"decode": {"replicas": 0}}))
    cluster.steps(EVENTS)
    goal = cluster.settle()
    assert (goal.target.name, goal.previous, goal.to_prove) == (new, None, False)
    assert cluster.of_revision(old) == []


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
