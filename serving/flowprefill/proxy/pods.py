"""The pods the proxy works with: endpoints from discovery, state streams from prefill pods, what is outstanding."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from flowprefill.clock import Clock
from flowprefill.proxy.placement import Coefficients, Pod
from flowprefill.proxy.revisions import (
    COLOCATED,
    DECODE,
    PREFILL,
    Revision,
    num_proxies,
    usable_revisions,
)
from flowprefill.wire import Endpoint, PodState

log = logging.getLogger(__name__)

STALE_S = 6.0
"""A stream is lost when no line came for this long; pods send one every 2 s."""

RETRY_S = 0.5
RETRY_ABSENT_S = 30.0
"""Wait before asking again a pod that has no state stream (404), such as stock vLLM."""

SUSPECT_S = 1.0
MAX_LINE_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class DecodePod:
    """A decode pod and the sequences of ours that it holds."""

    endpoint: Endpoint
    num_sequences: int = 0
    suspect_until_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Watched:
    endpoint: Endpoint
    pod: Pod
    task: asyncio.Task[None] | None = None
    suspect_until_s: float = 0.0
    unreachable: bool = False


@dataclass(slots=True)
class PodTable:
    """All known pods. Lives on the event loop; `changed` is called after every change that may free a place.

    `colocated` is the mode of `own_revision`; what others do is seen by their pods.
    """

    http: httpx.AsyncClient
    clock: Clock
    colocated: bool
    own_revision: str
    changed: Callable[[], None]
    removed: Callable[[str], None] = lambda name: None
    num_proxies: int = 1
    revisions: tuple[Revision, ...] = ()
    _first: dict[str, _Watched] = field(default_factory=dict)
    _decode: dict[str, DecodePod] = field(default_factory=dict)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Take over what discovery reports. Pods that are gone lose their stream; what they hold runs out."""
        self.revisions = usable_revisions(endpoints, own_revision=self.own_revision)
        self.num_proxies = num_proxies(endpoints)
        first = {e.name: e for e in endpoints if e.role in (PREFILL, COLOCATED)}
        decode = {e.name: e for e in endpoints if e.role == DECODE}
        for name in set(self._first) | set(self._decode):
            known = self._first[name].endpoint if name in self._first else self._decode[name].endpoint
            now = first.get(name) or decode.get(name)
            if now is None or (now.address, now.role) != (known.address, known.role):
                self._forget(name)
        for name, endpoint in first.items():
            watched = self._first.get(name)
            if watched is None:
                pod = Pod(name=name, revision=endpoint.revision)
                watched = self._first[name] = _Watched(endpoint=endpoint, pod=pod)
                watched.task = asyncio.create_task(self._follow(watched), name=f"state of {name}")
            watched.endpoint = endpoint
        for name, endpoint in decode.items():
            self._decode.setdefault(name, DecodePod(endpoint=endpoint)).endpoint = endpoint
        self.changed()

    @property
    def one_leg(self) -> bool:
        """Whether the newest usable revision, or our own where none is, takes a request in one leg."""
        return self.revisions[0].colocated if self.revisions else self.colocated

    def candidates(self) -> list[Pod]:
        """Prefill (or colocated) pods of usable revisions; `rank`, `leaving` and `suspect` are up to date."""
        now_s = self.clock.now_s()
        pods = []
        for rank, revision in enumerate(self.revisions):
            for endpoint in revision.first:
                watched = self._first[endpoint.name]
                watched.pod.rank = rank
                watched.pod.leaving = endpoint.terminating
                watched.pod.suspect = watched.unreachable or watched.suspect_until_s > now_s
                pods.append(watched.pod)
        return pods

    def endpoint(self, name: str) -> Endpoint:
        return self._first[name].endpoint

    def coefficients(self) -> Coefficients | None:
        """A prediction from some pod, for pods that report none."""
        return next((w.pod.coefficients for w in self._first.values() if w.pod.coefficients), None)

    def pick_first(self, revision: str) -> Endpoint | None:
        """The prefill (or colocated) pod of this revision with the fewest requests of ours.

        None when the revision is not usable, or only with pods that terminate.
        """

        def order(pod: Pod) -> tuple[bool, bool, int, str]:
            return pod.suspect, not pod.takes, len(pod.outstanding), pod.name

        staying = {r.name for r in self.revisions if not r.leaving}
        pods = [pod for pod in self.candidates() if pod.revision == revision and revision in staying]
        return self.endpoint(min(pods, key=order).name) if pods else None

    def pick_decode(self, revision: str, avoid: frozenset[str] = frozenset()) -> DecodePod | None:
        """The decode pod of this revision with the fewest sequences of ours; `avoid` only when no other is left."""
        found = next((r for r in self.revisions if r.name == revision), None)
        if found is None or not found.decode:
            return None
        now_s = self.clock.now_s()
        pods = [self._decode[e.name] for e in found.decode]
        return min(
            pods,
            key=lambda p: (
                p.endpoint.name in avoid,
                p.suspect_until_s > now_s,
                p.num_sequences,
                p.endpoint.name,
            ),
        )

    def suspect(self, name: str) -> None:
        """A connection to this pod failed: prefer others for a moment."""
        until_s = self.clock.now_s() + SUSPECT_S
        if name in self._first:
            self._first[name].suspect_until_s = until_s
        if name in self._decode:
            self._decode[name].suspect_until_s = until_s

    def next_trust_s(self, now_s: float) -> float | None:
        """When the next pod is no longer suspect by time alone; None when none is."""
        later = [w.suspect_until_s for w in self._first.values() if w.suspect_until_s > now_s]
        return min(later, default=None)

    def outstanding(self) -> dict[tuple[str, str], int]:
        """Requests of ours by (role, pod), for metrics."""
        held = {(w.endpoint.role, name): len(w.pod.outstanding) for name, w in self._first.items()}
        return held | {(DECODE, name): pod.num_sequences for name, pod in self._decode.items()}

    def num_endpoints(self) -> dict[str, int]:
        """Pods of usable revisions by role, for metrics; those of our own mode also when there are none."""
        counts = dict.fromkeys((COLOCATED,) if self.colocated else (PREFILL, DECODE), 0)
        for revision in self.revisions:
            for endpoint in (*revision.first, *revision.decode):
                counts[endpoint.role] = counts.get(endpoint.role, 0) + 1
        return counts

    async def close(self) -> None:
        tasks = [w.task for w in self._first.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, name: str) -> None:
        watched = self._first.pop(name, None)
        if watched is not None and watched.task is not None:
            watched.task.cancel()
        self._decode.pop(name, None)
        self.removed(name)

    async def _follow(self, watched: _Watched) -> None:
        """Read a pod's state stream for as long as the pod is known; reconnect with a pause."""
        name = watched.endpoint.name
        while True:
            wait_s = RETRY_S
            try:
                wait_s = await self._read_stream(watched)
            except (httpx.HTTPError, ValidationError, ValueError) as error:
                log.debug("state stream lost", extra={"pod": name, "error": repr(error)})
                watched.unreachable = isinstance(error, httpx.TransportError)
            if watched.pod.state is not None:
                watched.pod.state = None
                self.changed()
            await asyncio.sleep(wait_s)

    async def _read_stream(self, watched: _Watched) -> float:
        """Read until the stream ends; returns the pause before the next try, in seconds."""
        timeout = httpx.Timeout(5.0, read=STALE_S)
        url = f"http://{watched.endpoint.admin}/v1/state"
        async with self.http.stream("GET", url, timeout=timeout) as response:
            if watched.unreachable:
                watched.unreachable = False
                self.changed()
            if response.status_code != httpx.codes.OK:
                return RETRY_ABSENT_S if response.status_code in (404, 405, 501) else RETRY_S
            buffer = b""
            async for chunk in response.aiter_bytes():
                *lines, buffer = (buffer + chunk).split(b"\n")
                newest = next((line for line in reversed(lines) if line.strip()), None)
                if newest is not None:
                    self._take(watched, PodState.model_validate_json(newest))
                if len(buffer) > MAX_LINE_BYTES:
                    raise ValueError(f"a state line has more than {MAX_LINE_BYTES} bytes")
        return RETRY_S

    def _take(self, watched: _Watched, state: PodState) -> None:
        pod = watched.pod
        pod.state = state
        pod.state_at_s = self.clock.now_s()
        pod.cached = frozenset(state.cached_prefixes)
        pod.coefficients = state.prediction or pod.coefficients
        self.changed()
