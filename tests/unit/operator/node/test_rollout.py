"""Decisions of the local node: what starts, what stops, and that it always ends at what is wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from flowprefill_operator.node.desired import Group
from flowprefill_operator.node.rollout import PodView, decide
from flowprefill_operator.node.template import PodSpec, PodTemplate

TEMPLATE = PodTemplate(spec=PodSpec(containers=()))


def group(role: str, version: str, replicas: int = 1, *, recreate: bool = False) -> Group:
    return Group(
        deployment=f"{role}-{version}" if role != "proxy" else "proxy",
        template_hash=version,
        role=role,
        revision=version,
        replicas=replicas,
        recreate=recreate and role != "proxy",
        template=TEMPLATE,
    )


def pod(of: Group, name: str, *, ready: bool = True, terminating: bool = False) -> PodView:
    return PodView(name=name, group=of.key, role=of.role, ready=ready, terminating=terminating)


OLD, NEW = group("prefill", "1"), group("prefill", "2")


def test_the_old_revision_stays_until_all_of_the_new_one_is_ready() -> None:
    decode = group("decode", "2")
    pods = [pod(OLD, "old"), pod(NEW, "new"), pod(decode, "d", ready=False)]
    assert decide([NEW, decode], pods).stop == ()
    assert decide([NEW, decode], [*pods[:2], pod(decode, "d")]).stop == ("old",)


def test_with_recreate_nothing_new_starts_while_an_old_worker_is_left() -> None:
    new = group("prefill", "2", recreate=True)
    assert decide([new], [pod(OLD, "old")]).start == ()
    assert decide([new], [pod(OLD, "old")]).stop == ("old",)
    assert decide([new], [pod(OLD, "old", ready=False, terminating=True)]).start == ()
    assert decide([new], []).start == (new.key,)


def test_with_recreate_a_proxy_is_still_replaced_without_a_gap() -> None:
    worker, proxy = group("prefill", "2", recreate=True), group("proxy", "2")
    old_proxy = group("proxy", "1")
    decision = decide([worker, proxy], [pod(OLD, "old"), pod(old_proxy, "p1")])
    assert decision.stop == ("old",)
    assert decision.start == (proxy.key,)


def test_scaling_down_takes_a_pod_that_is_not_ready_then_the_youngest() -> None:
    pods = [pod(NEW, "a"), pod(NEW, "b", ready=False), pod(NEW, "c")]
    assert decide([replace(NEW, replicas=2)], pods).stop == ("b",)
    assert set(decide([NEW], pods).stop) == {"b", "c"}


def test_a_stopping_pod_is_replaced_and_not_stopped_twice() -> None:
    decision = decide([NEW], [pod(NEW, "a", ready=False, terminating=True)])
    assert decision.start == (NEW.key,)
    assert decision.stop == ()


@dataclass
class World:
    """Pods that do as decided, in the order the test draws."""

    pods: dict[str, PodView]
    made: int = 0

    def obey(self, groups: list[Group]) -> None:
        decision = decide(groups, list(self.pods.values()))
        assert len(set(decision.stop)) == len(decision.stop)
        by_key = {g.key: g for g in groups}
        for key in decision.start:
            self.made += 1
            self.pods[f"n{self.made}"] = pod(by_key[key], f"n{self.made}", ready=False)
        for name in decision.stop:
            assert not self.pods[name].terminating
            self.pods[name] = replace(self.pods[name], ready=False, terminating=True)


@given(
    before=st.integers(0, 3),
    replicas=st.integers(0, 3),
    recreate=st.booleans(),
    choices=st.lists(st.integers(0, 9), max_size=60),
)
def test_every_order_of_events_ends_at_exactly_the_wanted_pods(
    before: int, replicas: int, recreate: bool, choices: list[int]
) -> None:
    old = [group("prefill", "1", before), group("proxy", "1")]
    new = [group("prefill", "2", replicas, recreate=recreate), group("proxy", "2")]
    world = World({f"o{i}": pod(old[0], f"o{i}") for i in range(before)} | {"op": pod(old[1], "op")})
    world.obey(new)
    for step in range(200):
        pending = [p for p in world.pods.values() if p.terminating or not p.ready]
        if not pending:
            break
        choice = choices[step] if step < len(choices) else 0
        chosen = pending[choice % len(pending)]
        if chosen.terminating:
            del world.pods[chosen.name]
        else:
            world.pods[chosen.name] = replace(chosen, ready=True)
        proxies = [p for p in world.pods.values() if p.role == "proxy" and not p.terminating]
        world.obey(new)
        assert proxies, "clients always have a proxy"
    left = sorted((p.role, p.group[1], p.ready) for p in world.pods.values())
    assert left == sorted([("prefill", "2", True)] * replicas + [("proxy", "2", True)])
