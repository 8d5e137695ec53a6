"""A rank that tells what it computed, and whose leader can be asked to pause at a point of a test's choice.

Named by `--worker-cls`; a test's methods reach it by vLLM's RPC, in the rank's main thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from flowprefill.execution.collective import LEADER
from flowprefill.server.vllm.ranks.worker import RankedWorker
from support.vllm.digests import digest
from vllm import forward_context
from vllm.distributed.parallel_state import get_tp_group


class ProbeWorker(RankedWorker):
    """See the module."""

    def join_ranks(self, address: str) -> None:
        self._pause_at: dict[int, int | None] = {}  # by task
        self._num_passed: dict[int, int] = {}
        self._fail_at: tuple[int, str] | None = None
        self._num_tickets = 0
        self._task = threading.local()
        self._logits: dict[int, dict[str, str]] = {}
        self._num_reduced = 0
        self._last_stint: Any = None
        self._num_met = 0
        self._false_meetings = 0
        self._watch_logits()
        self._watch_collectives()
        self.stage.housekeeping = self._at_point
        super().join_ranks(address)
        self._watch_steps()

    def probe_expect(self, task_id: int, pause_at: int | None) -> None:
        """This step advances next; its leader is to be asked to pause at this point."""
        self._pause_at[task_id] = pause_at

    def probe_fail_at(self, failing: tuple[int, str] | None) -> None:
        """Have whatever runs raise at this point, with this reason; None for nothing."""
        self._fail_at = failing

    def probe_computed(
        self, task_id: int, blocks: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, str], dict[str, str], int]:
        """A step's digests of logits and of these blocks in every layer, by request, and its points. Once."""
        self._pause_at.pop(task_id, None)
        kv = {name: self._digest_of(block_ids) for name, block_ids in blocks.items()}
        return self._logits.pop(task_id, {}), kv, self._num_passed.pop(task_id, 0)

    def _digest_of(self, block_ids: Sequence[int]) -> str:
        found = hashlib.sha256()
        for layer in self._first_runner.kv_caches:
            for block_id in block_ids:
                found.update(layer[block_id].contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def probe_left_over(self) -> dict[str, Any]:
        """What should not be there with nothing to do."""
        member = self._member
        found = {
            "slots": len(self.slots.all) - self.slots.num_free,
            "known to runners": self.slots.num_requests,
            "stint": repr(self.stage.stint) if self.stage.stint else None,
            "forward context": repr(forward_context._forward_context)
            if forward_context._forward_context
            else None,
            "meetings without a collective": self._false_meetings,
            "boards": len(member._boards),
            "results": len(member._results),
            "left behind": len(member._engine._left_behind),
        }
        return {name: value for name, value in found.items() if value}

    def _at_point(self) -> None:
        stint, task_id = self.stage.stint, getattr(self._task, "id", None)
        if stint is None or task_id is None:
            return
        self._check_meeting(stint)
        index = stint.index - 1
        if self._fail_at is not None and index == self._fail_at[0]:
            raise RuntimeError(self._fail_at[1])
        if task_id not in self._pause_at:
            return
        self._num_passed[task_id] = stint.index
        if self.rank == LEADER and self._pause_at[task_id] == index:
            self._pause_at[task_id] = None
            self._num_tickets += 1
            self._member._pool.preempt(task_id, self._num_tickets)

    def _check_meeting(self, stint: Any) -> None:
        """A point that counts as a meeting has a collective before it; judged where no other step ran in between."""
        if stint is self._last_stint and stint.num_meetings > self._num_met and self._num_reduced == 0:
            self._false_meetings += 1
        self._last_stint, self._num_met, self._num_reduced = stint, stint.num_meetings, 0

    def _watch_collectives(self) -> None:
        group = get_tp_group()
        reduce = group._all_reduce_out_place

        def counted(tensor: Any) -> Any:
            output = reduce(tensor)
            self._num_reduced += 1
            return output

        group._all_reduce_out_place = counted

    def _watch_steps(self) -> None:
        run = self._member._engine.run

        def noted(plan: Any, gate: Any) -> Any:
            self._task.id = plan.task_id
            try:
                return run(plan, gate)
            finally:
                self._task.id = None

        self._member._engine.run = noted

    def _watch_logits(self) -> None:
        model = self._first_runner.get_model()
        compute = model.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            task_id = getattr(self._task, "id", None)
            if logits is not None and task_id is not None:
                names = self.model_runner.input_batch.req_ids
                assert len(names) == len(logits), "a row for each request"
                found = {name: digest(row) for name, row in zip(names, logits, strict=True)}
                self._logits.setdefault(task_id, {}).update(found)
            return logits

        model.compute_logits = watched
