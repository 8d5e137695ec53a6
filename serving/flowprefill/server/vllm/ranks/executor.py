"""Where vLLM's workers run when there are several. Named by `--distributed-executor-backend` for tensor parallel."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from flowprefill.clock import Clock
from flowprefill.errors import InvalidConfiguration
from flowprefill.server.vllm.ranks.connectors import ConnectorReports
from flowprefill.server.vllm.ranks.gathering import Meeting
from flowprefill.server.vllm.ranks.pool import RankedPool


class RankedExecutor(MultiprocExecutor):
    """A process for each rank, all on this machine. vLLM starts, watches and ends them as ever."""

    _pool: RankedPool | None = None

    def _init_executor(self) -> None:
        parallel = self.vllm_config.parallel_config
        if parallel.nnodes_within_dp != 1:
            raise InvalidConfiguration(
                f"--nnodes is {parallel.nnodes_within_dp}; accepted is 1: all ranks of an engine run on one machine"
            )
        super()._init_executor()

    def ranked_pool(self, clock: Clock, num_slots: int) -> RankedPool:
        """Have the ranks come, and run steps on them. Once; `shutdown` closes it. Raises EngineFailed when one does not come."""
        assert self._pool is None, "the ranks come once"
        meeting = Meeting()
        try:
            joined = self.collective_rpc("join_ranks", args=(meeting.address,), non_block=True)
            processes = {worker.proc.pid: worker.rank for worker in self.workers}
            gathering = meeting.gather(processes, num_slots)
            joined.result()
        finally:
            meeting.close()
        self._pool = RankedPool(
            gathering.links,
            gathering.page,
            gathering.ready,
            ConnectorReports(self.kv_output_aggregator),
            clock,
        )
        return self._pool

    def shutdown(self) -> None:
        """End steps under way, then the ranks."""
        if self._pool is not None:
            self._pool.close()
        super().shutdown()
