"""A service on this machine as a benchmark's target."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from flowprefill.errors import FlowPrefillError

if TYPE_CHECKING:
    from flowprefill_crd import FlowPrefillService
    from flowprefill_operator.node.state import NodeStatus, PodReport

READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 120.0


class LocalTarget:
    """One service on the local node, on a free port, with its state below `root`; implements `bench.target.Target`.

    It ends with this process, however that ends. Tells what happens while it waits. Not thread-safe.
    """

    def __init__(self, root: Path, service: FlowPrefillService) -> None:
        from flowprefill.cli.narrator import Narrator
        from flowprefill.cli.services import state_of

        meta = service.metadata
        self._state = state_of(root, meta.namespace, meta.name).create()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._narrator = Narrator(foreground=False)

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, without `/v1`."""
        return self._status().url

    def admin_url(self, role: str) -> str:
        """Base URL of the admin port of the one pod of this role."""
        return f"http://127.0.0.1:{self._pod(role).ports['admin']}"

    def pid(self, role: str) -> int:
        """Process id of the one pod of this role on this machine."""
        pid = self._pod(role).containers[0].pid
        if pid is None:
            raise FlowPrefillError(f"the {role} pod does not run now")
        return pid

    def apply(self, service: FlowPrefillService) -> None:
        """Start the service, or bring a running one to this spec; returns once it is in full use.

        Raises FlowPrefillError when it does not get there.
        """
        from flowprefill.cli.services import supervisor_argv, text_of
        from flowprefill_operator.node.control import NotInUse, change, is_applied, start
        from flowprefill_operator.node.state import Options

        text = text_of(service)
        try:
            if self._supervisor is None:
                self._supervisor = start(
                    self._state,
                    text,
                    Options(port=0),
                    [*supervisor_argv(self._state), "--bound"],
                    timeout_s=READY_TIMEOUT_S,
                    on_status=self._narrator.tell,
                    bound=True,
                )
            elif not is_applied(self._state, text):
                change(self._state, text, timeout_s=READY_TIMEOUT_S, on_status=self._narrator.tell)
        except NotInUse as error:
            raise FlowPrefillError(f"{error}\n{self._reasons()}") from error

    def stop(self) -> None:
        """End the service; nothing of it is left."""
        from flowprefill_operator.node.control import stop

        if not stop(self._state, timeout_s=STOP_TIMEOUT_S, now=True):
            raise FlowPrefillError(f"processes of {self._state.name} do not end; see {self._state.logs}")
        if self._supervisor is not None:
            self._supervisor.communicate()
            self._supervisor = None

    def _reasons(self) -> str:
        """The last line of each pod that is not ready."""
        from flowprefill_operator.node.insight import look

        view = look(self._state)
        return "\n".join(f"{name}: {line}" for name, line in view.last_lines.items())

    def _status(self) -> NodeStatus:
        status = self._state.read_status()
        if status is None:
            raise FlowPrefillError("the service was not started")
        return status

    def _pod(self, role: str) -> PodReport:
        found = [pod for pod in self._status().pods if pod.role == role and not pod.terminating]
        if len(found) != 1:
            raise FlowPrefillError(f"{len(found)} {role} pods run; a benchmark needs exactly one")
        return found[0]
