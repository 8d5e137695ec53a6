"""Leadership by a Lease, on the Kubernetes client's own election. A lost Lease ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, V1Lease, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection import electionconfig, leaderelection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

log = logging.getLogger(__name__)

UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)


class LostLease(Exception):
    """Another process may be at work by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseName:
    """Which Lease, who we are, and how long a holder that fell silent keeps it, in seconds."""

    namespace: str
    name: str
    identity: str
    lease_s: int


class _PatientLock(LeaseLock):
    """A lock for which an API server that does not answer is one failed try, not the end. `seen` is told at every try
    whether the Lease could be read, or made."""

    seen: Callable[[bool], None]
    problems: dict[str, str]
    """Verb to why its last try has failed."""

    async def get(self, name: str, namespace: str) -> Any:  # Any: the base class answers with several tuples
        try:
            found = await super().get(name, namespace)
        except UNREACHABLE as error:
            found = (False, ApiException(status=0, reason=f"API server unreachable: {error}"))
        absent = isinstance(found[1], ApiException) and found[1].status == 404
        if not found[0] and not absent:
            self._failed("lease cannot be read", "get", found[1])
        else:
            self.problems.pop("get", None)
        self.seen(bool(found[0]))
        return found

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        # Not the base class's: it asks for `pretty=True`, which its own client refuses (kubernetes 37.0).
        spec = self.update_lease(election_record)
        body = V1Lease(metadata=V1ObjectMeta(name=name), spec=spec)
        try:
            self.lease_reference = await self.api_instance.create_namespaced_lease(namespace, body)
        except (ApiException, *UNREACHABLE) as error:
            self._failed("lease cannot be made", "create", error)
            return False
        self.problems.pop("create", None)
        self.seen(True)
        return True

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        # Not the base class's, whose failed try is a traceback in the log.
        lease = self.lease_reference
        assert lease is not None
        lease.spec = self.update_lease(updated_record, lease.spec)
        try:
            await self.api_instance.replace_namespaced_lease(name=name, namespace=namespace, body=lease)
        except (ApiException, *UNREACHABLE) as error:
            self._failed("lease cannot be updated", "update", error)
            return False
        self.problems.pop("update", None)
        return True

    def _failed(self, what: str, verb: str, error: object) -> None:
        """Tell of a try that failed, once for the same reason."""
        reason = str(getattr(error, "reason", None) or error)
        level = logging.DEBUG if self.problems.get(verb) == reason else logging.WARNING
        self.problems[verb] = reason
        log.log(level, what, extra={"lease": f"{self.namespace}/{self.name}", "verb": verb, "reason": reason})

    async def release(self) -> None:
        """Let the next candidate in at once."""
        with contextlib.suppress(ApiException, *UNREACHABLE):
            lease = await self.api_instance.read_namespaced_lease(self.name, self.namespace)
            if lease.spec is None or lease.spec.holder_identity != self.identity:
                return
            lease.spec.holder_identity = ""
            await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)
            log.info("lease given back", extra={"lease": f"{self.namespace}/{self.name}"})


async def lead(
    api: ApiClient, at: LeaseName, work: Callable[[], Awaitable[None]], *, seen: Callable[[bool], None]
) -> None:
    """Wait for the Lease, run `work` while it is held, give it back when `work` is done. `seen` is told at every try
    whether the Lease could be read.

    Raises `LostLease` when the Lease could not be renewed in time, and what `work` raises.
    """
    logging.getLogger(leaderelection.__name__).setLevel(logging.CRITICAL)  # it repeats what the lock tells
    lock = _PatientLock(at.name, at.namespace, at.identity, api)
    lock.seen, lock.problems = seen, {}
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def started() -> None:
        log.info("leading", extra={"lease": f"{at.namespace}/{at.name}", "identity": at.identity})
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not outcome.done():
                outcome.set_exception(error)
        else:
            if not outcome.done():
                outcome.set_result(None)

    async def stopped() -> None:
        if not outcome.done():
            outcome.set_exception(
                LostLease(f"the Lease {at.namespace}/{at.name} could not be renewed in time")
            )

    config = electionconfig.Config(
        lock=lock,
        lease_duration=at.lease_s,
        renew_deadline=max(at.lease_s * 2 / 3, 2),
        retry_period=max(at.lease_s / 7, 1.0),
        onstarted_leading=started,
        onstopped_leading=stopped,
    )
    log.info("waiting for the lease", extra={"lease": f"{at.namespace}/{at.name}", "identity": at.identity})
    election = asyncio.create_task(leaderelection.LeaderElection(config).run(), name="lease")
    try:
        await asyncio.wait({election, outcome}, return_when=asyncio.FIRST_COMPLETED)
        if election.done() and not outcome.done():
            election.result()
        await outcome
    finally:
        election.cancel()
        await asyncio.gather(election, return_exceptions=True)
        if not outcome.done() or outcome.exception() is None:
            await lock.release()
