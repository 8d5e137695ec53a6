"""Model runners, one for each step that can be in flight.

A step that is parked in the middle of a forward needs its inputs, block tables and attention metadata as they were. vLLM's
runner keeps them in persistent buffers, so each step has a runner of its own: a *slot*. Slots share the model, the KV
cache and what is known of requests; a request may go on in another slot.

| state | treatment |
| --- | --- |
| input ids, positions, sequence lengths, block tables, slot mappings | private buffers |
| attention metadata builders | private |
| `execute_model_state`, KV connector output | private |
| `requests`, `num_prompt_logprobs`, `encoder_cache` | shared |
| rows of the input batch | private, dropped when the request's last step ran in another slot: their block table is old |
| model, KV cache tensors | shared |
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as PlatformRunner
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as PlatformRunner

_SHARED = (
    "encoder_cache",
    "intermediate_tensors",
    "is_multimodal_pruning_enabled",
    "jit_warmup_registry",
    "kv_sharing_fast_prefill_eligible_layers",
    "lora_manager",
    "model",
    "num_prompt_logprobs",
    "requests",
    "requires_sequential_video_encoding",
    "shared_kv_cache_layers",
    "use_aux_hidden_state_outputs",
)


class SlotRunner(PlatformRunner):
    """A further runner beside the worker's first one."""

    def attach(self, first: Any, kv_cache_config: Any) -> None:
        """Share what the first runner has loaded and allocated."""
        for name in _SHARED:
            if hasattr(first, name):
                setattr(self, name, getattr(first, name))
        self._first = first
        self.initialize_kv_cache(
            kv_cache_config, is_profiling=True
        )  # profiling: the connector has been told already
        if current_platform.is_cpu():
            self._postprocess_tensors()

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The KV cache is there already. What is returned here is for a connector alone."""
        self.kv_caches = self._first.kv_caches
        return {}


class Slot:
    """One runner and what its step leaves behind."""

    def __init__(self, index: int, runner: Any) -> None:
        self.index = index
        self.runner = runner
        self.connector_output: Any = None
        runner.maybe_get_kv_connector_output = self._connector_output_kept

    def abandon(self) -> Any:
        """Clean up after a step that was unwound; what the KV connector had to say, or None."""
        self.runner.execute_model_state = None
        self.runner.kv_connector_output = None
        output, self.connector_output = self.connector_output, None
        return output

    def _connector_output_kept(
        self, scheduler_output: Any, defer_finalize: bool = False
    ) -> AbstractContextManager[Any]:
        """As the runner's own, and the output stays when the forward is unwound: else finished sends would be lost."""
        return self._kept(scheduler_output, defer_finalize) if has_kv_transfer_group() else nullcontext()

    @contextmanager
    def _kept(self, scheduler_output: Any, defer_finalize: bool) -> Iterator[Any]:
        with KVConnectorModelRunnerMixin._get_kv_connector_output(
            scheduler_output, defer_finalize=defer_finalize
        ) as output:
            self.connector_output = output
            yield output


class Slots:
    """All slots of a worker. Handing out is thread-safe; the rest belongs to whoever holds the worker's `Exclusive`."""

    def __init__(self, first: Any, vllm_config: Any, kv_cache_config: Any, *, count: int) -> None:
        """Builds `count` runners beside the first one: the last is for empty steps, when steps stand in all the others."""
        runners = [first]
        for _ in range(count):
            with set_current_vllm_config(vllm_config):
                runner = SlotRunner(vllm_config, first.device)
                runner.attach(first, kv_cache_config)
            runners.append(runner)
        *usable, spare = (Slot(index, runner) for index, runner in enumerate(runners))
        self.all = tuple(usable)
        self.spare = spare
        self._free = set(range(count))
        self._given_back = threading.Condition()
        self._last_slot: dict[str, int] = {}  # by request

    def metadata_builders(self) -> Iterator[Any]:
        """The attention metadata builders of all slots in which steps run."""
        for slot in self.all:
            for groups in slot.runner.attn_groups:
                for group in groups:
                    yield group.get_metadata_builder()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_requests(self) -> int:
        """Requests the runners know of."""
        return len(self.all[0].runner.requests)

    def take(self, index: int) -> Slot:
        """This slot; waits until the step before has given it back.

        The caller chooses, and alike on every rank: rows of a batch lie in the order of their slot's history.
        """
        with self._given_back:
            self._given_back.wait_for(lambda: index in self._free)
            self._free.remove(index)
        return self.all[index]

    def give_back(self, slot: Slot) -> None:
        with self._given_back:
            self._free.add(slot.index)
            self._given_back.notify_all()

    def prepare(self, slot: Slot, scheduler_output: Any) -> None:
        """Drop rows of this slot that other slots have outdated since."""
        batch = slot.runner.input_batch
        for request_id in scheduler_output.num_scheduled_tokens:
            if self._last_slot.get(request_id) != slot.index and request_id in batch.req_id_to_index:
                batch.remove_request(request_id)  # also one of a request of before with the same id
            self._last_slot[request_id] = slot.index
        for request_id in scheduler_output.finished_req_ids:
            self._last_slot.pop(request_id, None)
