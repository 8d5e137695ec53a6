"""Rollouts, step by step in a simulated cluster whose events come in any order, and whose operator dies at any write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_operator.kinds import CLAIMS, CONFIG_MAPS, DEPLOYMENTS, kind_of
from flowprefill_operator.revisions import key_of
from flowprefill_operator.settings import PlanSettings
from support.rollouts import (
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
    revision_of,
    settled,
    spec,
)
from support.services import Spec
from support.simulated_cluster import SimulatedCluster, with_images


def snapshot(cluster: SimulatedCluster, revision: str) -> str:
    """A revision's objects as they were asked for, and its pods."""
    asked = [{**item, "status": None} for item in cluster.of_revision(revision)]
    pods = sorted(pod["metadata"]["name"] for pod in cluster.pods.values())
    return json.dumps([sorted(asked, key=lambda item: str(key_of(item))), pods], sort_keys=True)


def workers_outlive_proxies(revision: str) -> Any:
    """A watcher: while a proxy of the revision is left, which prefers its workers, they are."""

    def check(cluster: SimulatedCluster) -> None:
        if cluster.deployment("prefill", revision) is None or cluster.deployment("decode", revision) is None:
            assert not cluster.members("proxy", revision), "workers go before their proxies"

    return check


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
        if revision_of(proxy) == new:
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
    added = {pod["metadata"]["name"] for pod in cluster.pods.values() if revision_of(pod) == new}
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
        found = {revision_of(pod) for role in roles for pod in cluster.members(role)}
        assert len(found) <= 1, f"worker pods of {found}"

    cluster.watchers.append(check)
    new = cluster.ask(after)
    assert new != old
    cluster.steps(EVENTS)
    assert_rolled(cluster, new)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_role_without_pods_is_no_reason_to_wait_for_a_token_that_cannot_be_served(seed: int) -> None:
    cluster, old = settled(seed, TWO)
    new = cluster.ask(spec(TWO, OTHER, {"decode": {"replicas": 0}}))
    cluster.steps(EVENTS)
    goal = cluster.settle()
    assert (goal.target.name, goal.previous, goal.to_prove) == (new, None, False)
    assert cluster.of_revision(old) == []
