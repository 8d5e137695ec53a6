"""Everything that a status is made from, gathered once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowprefill_crd import FlowPrefillService
from flowprefill_operator.apply import Applied
from flowprefill_operator.rollout import Goal
from flowprefill_operator.scene import WORKER_ROLES, Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """What pods have said. `proven` are revisions that served a token; `unproven` is why the last trial failed.
    `generations` are the live documents in use by pod name; `attainment` is (met, missed) by class, None while no
    proxy can be reached; `mounts` are volumes that pods cannot mount, by pod name."""

    proven: frozenset[str] = frozenset()
    unproven: str | None = None
    generations: Mapping[str, int] = field(default_factory=dict)
    attainment: Mapping[str, tuple[int, int]] | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A service and its surroundings at one moment.

    `refusal` is (reason, message) of a spec that is not acted on. `goal` is None then; `applied` is None when nothing was
    to be applied (a refusal, or paused). `forbidden` are (verb, resource) that the operator may not use; `schema_outdated`
    tells that the cluster's CRD is of another release.
    """

    service: FlowPrefillService
    now: str
    scene: Scene
    goal: Goal | None
    applied: Applied | None
    reports: Reports = Reports()
    refusal: tuple[str, str] | None = None
    forbidden: tuple[tuple[str, str], ...] = ()
    schema_outdated: bool = False

    @property
    def serving(self) -> str | None:
        """The revision that requests go to; without a goal, one that has a ready pod in each of its roles."""
        if self.goal is not None:
            return self.goal.serving
        revisions = sorted({rev for (role, rev) in self.scene.deployments if role in WORKER_ROLES})
        return next((rev for rev in revisions if self.scene.serves(rev)), None)
