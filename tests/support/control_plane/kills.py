"""Kills the operator at every write of a creation and of a rollout, and compares what comes out with what always does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flowprefill_operator.kinds import SERVICES
from support.control_plane.end_state import end_state
from support.control_plane.operated import Operated, simulated
from support.control_plane.waiting import until

Json = dict[str, Any]
When = Literal["before", "after"]
Step = Literal["creation", "rollout"]
State = dict[tuple[str, str], Json]

NAME = "web"
FIRST: Json = {"prefill": {"replicas": 2}}
SECOND: Json = {"decode": {"maxBatchSize": 7}}
"""A change that needs new pods."""

CONVERGED_S = 30.0
"""From the operator's restart to the end state."""

NEVER = 1_000_000


@dataclass(slots=True)
class Kills:
    """Cases so far, and what was wrong with those that did not end where they should."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)


def kill_everywhere(cluster: Operated) -> Kills:
    """A kill at each write, once before it is done, and once after, when only the answer is lost."""
    wanted, num_writes = _undisturbed(cluster)
    most = max(num_writes.values())
    turns: list[tuple[int, When]] = [
        (number, when) for when in ("before", "after") for number in range(1, most + 1)
    ]
    kills = Kills()
    for index, (number, when) in enumerate(turns):
        namespace = f"killed-{index}"
        cluster.plane.kubectl("create", "namespace", namespace)
        for step in ("creation", "rollout"):
            at = number if number <= num_writes[step] else NEVER
            _run(cluster, namespace, step, at, when, wanted[step], kills)
        cluster.delete(SERVICES, namespace, NAME)
        cluster.plane.kubectl("delete", "namespace", namespace, "--wait=false")
    return kills


def _undisturbed(cluster: Operated) -> tuple[dict[Step, State], dict[Step, int]]:
    """What always comes out, and how many writes that takes."""
    namespace = "undisturbed"
    cluster.plane.kubectl("create", "namespace", namespace)
    wanted: dict[Step, State] = {}
    num_writes: dict[Step, int] = {}
    for step in ("creation", "rollout"):
        before = len(cluster.faulty.calls.writes())
        _begin(cluster, namespace, step)
        cluster.wait_ready(namespace, NAME)
        until(lambda: _num_deployments(cluster, namespace) == 3, "only one revision is left")
        wanted[step] = end_state(cluster, namespace, NAME)
        num_writes[step] = len(cluster.faulty.calls.writes()) - before
    cluster.delete(SERVICES, namespace, NAME)
    return wanted, num_writes


def _num_deployments(cluster: Operated, namespace: str) -> int:
    return sum(kind == "Deployment" for kind, _ in end_state(cluster, namespace, NAME))


def _begin(cluster: Operated, namespace: str, step: Step) -> None:
    if step == "creation":
        cluster.apply(namespace, simulated(NAME, **FIRST))
    else:
        cluster.change(namespace, NAME, SECOND)


def _run(
    cluster: Operated, namespace: str, step: Step, number: int, when: When, wanted: State, kills: Kills
) -> None:
    cluster.faulty.calls.at_write(number, cluster.operator.kill, when)
    _begin(cluster, namespace, step)
    until(
        lambda: not cluster.operator.running or _settled(cluster, namespace, wanted),
        f"{step}: killed at write {number}, or done",
    )
    was_killed = not cluster.operator.running
    cluster.faulty.calls.at_write(NEVER, lambda: None, when)
    if was_killed:
        kills.cases += 1
        cluster.operator.wait()
        cluster.operator.start()
        cluster.operator.wait_ready()
    try:
        until(lambda: _settled(cluster, namespace, wanted), "the end state", within_s=CONVERGED_S)
    except AssertionError:
        kills.failures.append(
            f"{step}, killed {when} write {number}: {_difference(cluster, namespace, wanted)}"
        )


def _settled(cluster: Operated, namespace: str, wanted: State) -> bool:
    ready = cluster.conditions(namespace, NAME).get("Ready", {}).get("status") == "True"
    return ready and end_state(cluster, namespace, NAME) == wanted


def _difference(cluster: Operated, namespace: str, wanted: State) -> str:
    found = end_state(cluster, namespace, NAME)
    lines = [f"missing {key}" for key in sorted(wanted.keys() - found.keys())]
    lines += [f"left over {key}" for key in sorted(found.keys() - wanted.keys())]
    for key in sorted(wanted.keys() & found.keys()):
        if wanted[key] != found[key]:
            lines.append(f"{key}: {found[key]} instead of {wanted[key]}")
    return "\n".join([*lines, cluster.told(namespace, NAME)])
