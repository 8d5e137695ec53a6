"""What a request to an API server asks for, and which requests a case refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

MUTATING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
OF_THE_LEADER = "leases.coordination.k8s.io"
EVENTS = frozenset({"events", "events.events.k8s.io"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request as RBAC sees it. `resource` is `plural.group`, or `plural` of the core group; with `/part`."""

    method: str
    verb: str
    resource: str
    namespace: str | None
    name: str | None
    user_agent: str
    dry_run: bool
    status: int | None = None
    """Status of the answer; None while there is none."""

    @property
    def writes(self) -> bool:
        """Whether it changes an object that is not a Lease or an Event."""
        return (
            self.method in MUTATING
            and not self.dry_run
            and self.resource != OF_THE_LEADER
            and self.resource not in EVENTS
        )


def call_of(method: str, path: str, query: Mapping[str, str], user_agent: str) -> Call:
    """What a request asks for."""
    parts = [part for part in path.split("/") if part]
    group, rest = "", list[str]()
    if parts[:1] == ["api"]:
        rest = parts[2:]
    elif parts[:1] == ["apis"]:
        group, rest = (parts[1] if len(parts) > 1 else ""), parts[3:]
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural = rest[0] if rest else "/" + path.strip("/")  # discovery, health
    name = rest[1] if len(rest) > 1 else None
    part = f"/{rest[2]}" if len(rest) > 2 else ""
    return Call(
        method=method,
        verb=_verb(method, name, query),
        resource=(f"{plural}.{group}" if group and rest else plural) + part,
        namespace=namespace,
        name=name,
        user_agent=user_agent,
        dry_run=query.get("dryRun") == "All",
    )


def _verb(method: str, name: str | None, query: Mapping[str, str]) -> str:
    match method:
        case "GET" if query.get("watch", "").lower() in {"1", "true"}:
            return "watch"
        case "GET":
            return "list" if name is None else "get"
        case "DELETE":
            return "deletecollection" if name is None else "delete"
        case "POST":
            return "create"
        case "PUT":
            return "update"
        case _:
            return method.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Requests that are answered with `status`; None matches everything."""

    status: int
    verb: str | None = None
    resource: str | None = None
    name: str | None = None

    def matches(self, call: Call) -> bool:
        return (
            self.verb in (None, call.verb)
            and self.resource in (None, call.resource)
            and self.name in (None, call.name)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hook:
    number: int
    when: Literal["before", "after"]
    action: Callable[[], None]


class Calls:
    """Every request in the order of its arrival, and what happens at the k-th write. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._num_writes = 0
        self._hook: _Hook | None = None

    def at_write(self, number: int, action: Callable[[], None], when: Literal["before", "after"]) -> None:
        """Call `action` once at the `number`-th write from now on (1 is the next).

        `before` it is forwarded, and then it never is; or `after` the API server has done it, and then its answer
        never arrives.
        """
        with self._lock:
            self._hook = _Hook(number=self._num_writes + number, when=when, action=action)

    def arrived(self, call: Call) -> tuple[int, _Hook | None]:
        """Note a request; its index and what happens at it."""
        with self._lock:
            self._calls.append(call)
            self._num_writes += call.writes
            hook = self._hook
            if hook is None or not call.writes or self._num_writes < hook.number:
                return len(self._calls) - 1, None
            self._hook = None
            return len(self._calls) - 1, hook

    def answered(self, index: int, status: int) -> None:
        """Note the status of an answer."""
        with self._lock:
            self._calls[index] = replace(self._calls[index], status=status)

    def all(self) -> list[Call]:
        """Every request so far."""
        with self._lock:
            return list(self._calls)

    def writes(self) -> list[Call]:
        """The writes so far: no Leases, no Events, no dry runs."""
        return [call for call in self.all() if call.writes]

    def writes_by_agent(self) -> dict[str, int]:
        """Number of writes per user agent."""
        found: dict[str, int] = {}
        for call in self.writes():
            found[call.user_agent] = found.get(call.user_agent, 0) + 1
        return found

    def clear(self) -> None:
        """Forget every request."""
        with self._lock:
            self._calls.clear()
            self._num_writes = 0
