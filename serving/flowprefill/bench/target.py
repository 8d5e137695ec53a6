"""The service under test, as a benchmark sees it. The command line supplies one; a test may supply another."""

from __future__ import annotations

from typing import Protocol

from flowprefill_crd import FlowPrefillService


class Target(Protocol):
    """A service that a benchmark may start, change and stop."""

    def apply(self, service: FlowPrefillService) -> None:
        """Start the service, or bring a running one to this spec; returns once it is in full use.

        Raises FlowPrefillError when it does not get there.
        """
        ...

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, without `/v1`."""
        ...

    def admin_url(self, role: str) -> str:
        """Base URL of the admin port of the one pod of this role."""
        ...

    def pid(self, role: str) -> int:
        """Process id of the one pod of this role on this machine."""
        ...

    def stop(self) -> None:
        """End the service; nothing of it is left."""
        ...
