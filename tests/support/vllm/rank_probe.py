"""A rank that tells what it computed, and whose leader can be asked to pause at a point of a test's choice.

Named by `--worker-cls`; a test's methods reach it by vLLM's RPC, in the rank's main thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from flowprefill.execution.collective import LEADER
from flowprefill.server.vllm.ranks.worker import RankedWorker
from support.vllm.digests import digest
from vllm import forward_context


class ProbeWorker(RankedWorker):
    """See the module."""

    def join_ranks(self, address: str) -> None:
        self._task_id: int | None = None
        self._pause_at: int | None = None
        self._fail_at: tuple[int, str] | None = None
        self._num_tickets = 0
        self._num_passed: dict[int, int] = {}
        self._logits: dict[int, dict[str, str]] = {}
        self._watch_logits()
        self.stage.housekeeping = self._at_point
        super().join_ranks(address)

    def probe_expect(self, task_id: int, pause_at: int | None) -> None:
        """This step advances next; its leader is to be asked to pause at this point."""
        self._task_id, self._pause_at = task_id, pause_at

    def probe_fail_at(self, failing: tuple[int, str] | None) -> None:
        """Have whatever runs raise at this point, with this reason; None for nothing."""
        self._fail_at = failing

    def probe_num_passed(self, task_id: int) -> int:
        """Points that the step has passed. Once."""
        return self._num_passed.pop(task_id)

    def probe_take_logits(self, task_id: int) -> dict[str, str]:
        return self._logits.pop(task_id, {})

    def probe_kv(self, block_ids: Sequence[int]) -> str:
        """Digest of these blocks in every layer of this rank's part."""
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
            "boards": len(member._boards),
            "results": len(member._results),
            "left behind": len(member._engine._left_behind),
        }
        return {name: value for name, value in found.items() if value}

    def _at_point(self) -> None:
        stint = self.stage.stint
        if stint is None or self._task_id is None:
            return
        self._num_passed[self._task_id] = stint.index
        index = stint.index - 1
        if self._fail_at is not None and index == self._fail_at[0]:
            raise RuntimeError(self._fail_at[1])
        if self.rank == LEADER and self._pause_at == index:
            self._pause_at = None
            self._num_tickets += 1
            self._member._pool.preempt(self._task_id, self._num_tickets)

    def _watch_logits(self) -> None:
        model = self._first_runner.get_model()
        compute = model.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None and self._task_id is not None:
                names = self.model_runner.input_batch.req_ids
                assert len(names) == len(logits), "a row for each request"
                found = {name: digest(row) for name, row in zip(names, logits, strict=True)}
                self._logits.setdefault(self._task_id, {}).update(found)
            return logits

        model.compute_logits = watched
