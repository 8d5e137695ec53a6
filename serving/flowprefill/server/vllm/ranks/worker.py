"""vLLM's worker as one of several ranks. Named by `--worker-cls` for tensor parallel."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flowprefill.engines.vllm_engine.steps import StepEngine
from flowprefill.engines.vllm_engine.worker import LOOKAHEAD, PreemptiveWorker
from flowprefill.engines.window import LaunchWindow
from flowprefill.server.vllm.ranks.gathering import join
from flowprefill.server.vllm.ranks.member import Member

RUN_AHEAD_POINTS = LOOKAHEAD + 1
"""How many points a host passes at most before its device has done the work: the window's, and the one that it waits at."""


class RankedWorker(PreemptiveWorker):
    """Runs the steps that its engine core sends, together with the other ranks."""

    _member: Member | None = None

    def join_ranks(self, address: str) -> None:
        """Come to the engine core and take steps from now on. Called by vLLM's RPC, once the model is loaded."""
        _forget_collective_memory()
        link, page = join(address)
        self._member = Member(
            self.rank,
            link,
            page,
            StepEngine(self, self.thread_context),
            run_ahead=0 if self.device.type == "cpu" else RUN_AHEAD_POINTS,
        )
        self.tell_connector_news = self._member.tell
        self._member.start()

    def new_window(self, num_tokens: int) -> LaunchWindow | None:
        """As of one rank, and for short steps too: without a window ranks could be any number of points apart."""
        if self.device.type != "cuda":
            return None
        return LaunchWindow(torch.cuda.Event, LOOKAHEAD)

    def shutdown(self) -> None:
        """Let go of the core, then of the model."""
        if self._member is not None:
            self._member.close()
        super().shutdown()


def _forget_collective_memory() -> None:
    """Take the names off the shared memory of collectives on a CPU, which vLLM leaves behind; every rank has it mapped by now."""
    name = os.environ.get("VLLM_DIST_IDENT")
    if name:
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)
