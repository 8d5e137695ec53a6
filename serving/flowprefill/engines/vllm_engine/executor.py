"""Where vLLM's workers run. Named by `--distributed-executor-backend`."""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from flowprefill.engines.vllm_engine.worker import PreemptiveWorker
from flowprefill.errors import InvalidConfiguration


class InProcessExecutor(UniProcExecutor):
    """One worker in the engine core's process, for tensor parallel size 1.

    A class of our own also keeps vLLM on a CPU from moving the worker into another process.
    """

    def _init_executor(self) -> None:
        size = self.vllm_config.parallel_config.world_size
        if size != 1:
            raise InvalidConfiguration(f"this executor runs 1 worker and {size} are asked for")
        super()._init_executor()

    @property
    def preemptive_worker(self) -> PreemptiveWorker:
        """The worker, for the loop that runs steps on it."""
        worker = self.driver_worker.worker
        if not isinstance(worker, PreemptiveWorker):
            raise InvalidConfiguration(
                f"--worker-cls gives {type(worker).__name__}; accepted is "
                f"{PreemptiveWorker.__module__}.{PreemptiveWorker.__qualname__}"
            )
        return worker
