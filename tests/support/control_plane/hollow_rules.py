"""Which behaviour a pod shows: the newest rule that matches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowprefill_crd.labels import ROLE, SERVICE, label_value
from support.control_plane.hollow_behaviour import Behaviour, Completes, Runs

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Pods that match every given field show `behaviour`.

    A deleted pod is finished after `stops_after_s`, at most its grace period; never when None.
    """

    behaviour: Behaviour
    namespace: str | None = None
    service: str | None = None
    role: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    predicate: Callable[[Json], bool] | None = None
    stops_after_s: float | None = 0.0

    def matches(self, pod: Json) -> bool:
        meta = pod["metadata"]
        has: Mapping[str, str] = meta.get("labels", {})
        wanted = dict(self.labels)
        if self.service is not None:
            wanted[SERVICE] = label_value(self.service)
        if self.role is not None:
            wanted[ROLE] = self.role
        return (
            self.namespace in (None, meta["namespace"])
            and wanted.items() <= has.items()
            and (self.predicate is None or self.predicate(pod))
        )


_RUNS = Rule(behaviour=Runs())
_COMPLETES = Rule(behaviour=Completes())


class Rules:
    """The rules of a node; used from any thread."""

    def __init__(self) -> None:
        self._rules: tuple[Rule, ...] = ()
        self._lock = threading.Lock()

    def add(self, rule: Rule) -> None:
        with self._lock:
            self._rules = (rule, *self._rules)

    def remove(self, rule: Rule) -> None:
        with self._lock:
            self._rules = tuple(known for known in self._rules if known is not rule)

    def clear(self) -> None:
        with self._lock:
            self._rules = ()

    def of(self, pod: Json) -> Rule:
        """The newest matching rule; otherwise pods of Jobs complete and all others run."""
        for rule in self._rules:
            if rule.matches(pod):
                return rule
        owners = pod["metadata"].get("ownerReferences", ())
        return _COMPLETES if any(owner["kind"] == "Job" for owner in owners) else _RUNS
