"""What a user of the API server did, and what rules allow: read from an audit log and from rendered roles.

A triple is (API group, resource or resource/subresource, verb), as RBAC names them; the core group is "".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ANSWERED = "ResponseComplete"
"""Stage of a finished request. A watch ends late: its start is what counts."""

STARTED = "ResponseStarted"


class Triple(NamedTuple):
    """One right, or one use of it."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`missing`: used or wanted but not allowed; `unused`: allowed but not used. Both sorted."""

    missing: tuple[Triple, ...]
    unused: tuple[Triple, ...]

    def __str__(self) -> str:
        return f"missing: {', '.join(map(str, self.missing)) or 'none'}; unused: {', '.join(map(str, self.unused)) or 'none'}"


def used(audit_log: Path, user: str) -> frozenset[Triple]:
    """What the user asked the API server for, allowed or not, in a log of JSON lines at level Metadata or above.

    Requests that are no object requests (/healthz, discovery) need no right of their own and are left out. A
    server-side apply that created its object (a patch answered 201) needed create too. A line that is still being
    written is left out.
    """
    found: set[Triple] = set()
    with audit_log.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                found |= _of_event(json.loads(line), user)
    return frozenset(found)


def _of_event(event: Mapping[str, Any], user: str) -> set[Triple]:
    reference = event.get("objectRef")
    if event.get("stage") not in (ANSWERED, STARTED) or not reference or "resource" not in reference:
        return set()
    who = event.get("impersonatedUser") or event["user"]
    if who.get("username") != user:
        return set()
    group, resource = reference.get("apiGroup", ""), reference["resource"]
    if "subresource" in reference:
        resource = f"{resource}/{reference['subresource']}"
    verbs = {event["verb"]}
    if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
        verbs.add("create")
    return {Triple(group, resource, verb) for verb in verbs}


def allowed(rules: Iterable[Mapping[str, Any]]) -> frozenset[Triple]:
    """What rules of roles allow, whatever names they are narrowed to. Rules with `*` and non-resource URLs raise."""
    found: set[Triple] = set()
    for rule in rules:
        if rule.get("nonResourceURLs"):
            raise ValueError(f"a rule on {rule['nonResourceURLs']} allows no resource")
        parts = rule["apiGroups"], rule["resources"], rule["verbs"]
        if any("*" in part for part in parts):
            raise ValueError(f"{dict(rule)} has *, which allows more than can be listed")
        found |= {Triple(group, name, verb) for group in parts[0] for name in parts[1] for verb in parts[2]}
    return frozenset(found)


def compare(
    uses: Iterable[Triple], rules: Iterable[Mapping[str, Any]], *, granted: Iterable[Triple] = ()
) -> Difference:
    """Uses against rules. `granted`: rights held only to be granted to others, which count as used.

    Kubernetes asks for `update` of an owner's finalizers subresource when a child names it, without a request of its
    own in the log: name it in `granted` too.
    """
    wanted, given = frozenset(uses) | frozenset(granted), allowed(rules)
    return Difference(missing=tuple(sorted(wanted - given)), unused=tuple(sorted(given - wanted)))
