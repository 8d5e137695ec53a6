"""vLLM's worker with several runners and preemption points. Named by `--worker-cls`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import current_stream
from vllm.v1.outputs import KVConnectorOutput

from flowprefill.engines.vllm_engine.points import PointCounts, instrument
from flowprefill.engines.vllm_engine.slots import Slot, Slots
from flowprefill.engines.vllm_engine.stint import Stage
from flowprefill.engines.vllm_engine.supported import SETTINGS_KEY
from flowprefill.engines.vllm_engine.tiled_attention import build_tiles
from flowprefill.engines.vllm_engine.tiles import TileLimits
from flowprefill.engines.window import LaunchWindow
from flowprefill.scheduling.actions import Granularity

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

CONNECTOR_INTERVAL_S = 0.004
"""How often a running forward asks the KV connector for news, at most: leases of other pods must not expire meanwhile."""

LOOKAHEAD = 3
"""Operators whose launches run ahead of a GPU at most: enough to keep it fed when each takes 100 us."""

WINDOW_TOKENS = 256
"""Steps with fewer tokens run ahead as they like."""

DEFAULT_SLOTS = 9
"""One running step and `maxSuspended` (8) suspended ones."""


class PreemptiveWorker(PlatformWorker):
    """The platform's worker. `model_runner` is the runner of the slot that the calling thread uses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._of_thread = threading.local()
        self._first_runner: Any = None
        self.stage = Stage()
        self.slots: Slots
        self.points: PointCounts
        self.tell_connector_news: Callable[[Any], None] = lambda news: None
        self._asked_connector_s = 0.0
        self._stream: Any = None  # of all steps, on a GPU
        super().__init__(*args, **kwargs)

    @property
    def model_runner(self) -> Any:
        return getattr(self._of_thread, "runner", None) or self._first_runner

    @model_runner.setter
    def model_runner(self, runner: Any) -> None:
        self._first_runner = runner

    @contextmanager
    def using(self, slot: Slot) -> Iterator[None]:
        """Inside, this thread's model runner is the slot's."""
        self._of_thread.runner = slot.runner
        try:
            yield
        finally:
            self._of_thread.runner = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        compiled = self.vllm_config.compilation_config.mode != CompilationMode.NONE
        self.points = instrument(self._first_runner.get_model(), self.stage, compiled=compiled)

    @property
    def num_points(self) -> Mapping[Granularity, int]:
        """Points of one forward without tiles."""
        return {"operator": self.points.whole("operator"), "layer": self.points.whole("layer")}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self.slots = Slots(
            self._first_runner,
            self.vllm_config,
            kv_cache_config,
            count=int(self._settings.get("slots", DEFAULT_SLOTS)),
        )
        build_tiles(self.slots.metadata_builders(), self.stage)
        if has_kv_transfer_group():
            self.stage.housekeeping = self._ask_connector

    def set_tile_limits(self, limits: TileLimits | None) -> None:
        """Cut operators above these limits into tiles from the next step on; None leaves them whole."""
        self.stage.limits = limits

    def init_device(self) -> None:
        super().init_device()
        if self.device.type == "cuda":
            self._stream = current_stream()

    def new_window(self, num_tokens: int) -> LaunchWindow | None:
        """What bounds the launches of a step with so many tokens.

        None for short ones, which are over before anybody could wait for them, and where a call has ended when it returns.
        """
        if self.device.type != "cuda" or num_tokens < WINDOW_TOKENS:
            return None
        return LaunchWindow(torch.cuda.Event, LOOKAHEAD)

    def thread_context(self) -> AbstractContextManager[object]:
        """What a thread that runs steps needs; device, stream and inference mode are thread-local.

        All steps use one stream: what a parked one has launched precedes the next one's work, so memory, workspaces and
        collectives need no further order.
        """
        return _thread_context(self.device, self._stream)

    @property
    def _settings(self) -> dict[str, Any]:
        return (self.vllm_config.additional_config or {}).get(SETTINGS_KEY) or {}

    def _ask_connector(self) -> None:
        now_s = time.monotonic()
        if now_s - self._asked_connector_s < CONNECTOR_INTERVAL_S:
            return
        self._asked_connector_s = now_s
        news = get_kv_transfer_group().get_transfer_results(set())
        if news.finished_sending or news.finished_recving or news.failed_recving:
            self.tell_connector_news(
                KVConnectorOutput(
                    finished_sending=news.finished_sending,
                    finished_recving=news.finished_recving,
                    failed_recving=news.failed_recving,
                )
            )


@contextmanager
def _thread_context(device: torch.device, stream: Any) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)
    with torch.inference_mode():
        yield
