"""Puts the loop together inside vLLM's engine core process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from flowprefill.clock import MonotonicClock
from flowprefill.engines.protocol import EngineSpec
from flowprefill.engines.vllm_engine.executor import InProcessExecutor
from flowprefill.engines.vllm_engine.scheduler import AllocatingScheduler
from flowprefill.engines.vllm_engine.steps import StepEngine
from flowprefill.engines.vllm_engine.tiles import limits_for
from flowprefill.errors import InvalidConfiguration
from flowprefill.execution.pool import TaskPool
from flowprefill.scheduling.actions import Action
from flowprefill.scheduling.events import Event
from flowprefill.scheduling.predictor import fit
from flowprefill.scheduling.scheduler import Scheduler
from flowprefill.scheduling.snapshot import SchedulerSnapshot
from flowprefill.server.settings import scheduler_settings
from flowprefill.server.vllm.bridge import StepBridge
from flowprefill.server.vllm.channel import CoreChannel, Decided, Seen, Started
from flowprefill.server.vllm.core_settings import CoreSettings
from flowprefill.server.vllm.loop import PreemptiveLoop, within_slots
from flowprefill.server.vllm.ranks.executor import RankedExecutor
from flowprefill.server.vllm.step_pool import StepPool, StepRunner
from flowprefill.server.vllm.warm_up import WarmUp

log = logging.getLogger("vllm.flowprefill")


def run(core: Any, settings: CoreSettings) -> None:
    """Serve with our loop until vLLM shuts down. Raises InvalidConfiguration when a flag is missing."""
    vllm, executor = core.scheduler, core.model_executor
    if not isinstance(vllm, AllocatingScheduler):
        raise InvalidConfiguration(
            f"--scheduler-cls gives {type(vllm).__name__}; accepted is "
            f"{AllocatingScheduler.__module__}.{AllocatingScheduler.__qualname__}"
        )
    clock = MonotonicClock()
    runner, pool, connect_news = _steps(executor, settings, clock)
    spec = engine_spec(core, settings)
    profile = settings.profile
    if profile is None:
        warm_up = WarmUp(vllm, runner, pool, spec, core.request_block_hasher)
        profile = warm_up.profile(settings.warm_up_seconds)
    predictor = fit(profile)
    limits = limits_for(
        predictor.coefficients,
        num_layers=spec.num_layers,
        max_gap_s=settings.max_gap_milliseconds / 1000,
        rows=settings.operator_tile_tokens,
    )
    executor.collective_rpc("set_tile_limits", args=(limits,))
    bridge = StepBridge(vllm, runner, lambda outputs: _emit(core, outputs))
    num_slots = runner.num_slots
    scheduler = Scheduler(within_slots(scheduler_settings(settings.live), num_slots), bridge.kv, predictor)

    def heard(event: Event, actions: Sequence[Action], now_s: float, round_s: float) -> None:
        channel.send(Decided(event=event, actions=tuple(actions), now_s=now_s, round_s=round_s))

    def seen(snapshot: SchedulerSnapshot, cached_prefixes: tuple[int, ...]) -> None:
        channel.send(Seen(snapshot=snapshot, cached_prefixes=cached_prefixes))

    loop = PreemptiveLoop(
        core,
        pool,
        scheduler,
        bridge,
        settings.live,
        clock,
        num_slots=num_slots,
        heard=heard,
        seen=seen,
    )
    connect_news(loop.connector_news)
    channel = CoreChannel(settings.channel, lambda message: loop.reconfigure(message.live))
    channel.send(Started(spec=spec, profile=profile))
    log.info(
        "flowprefill %s schedules: policy %s, preemption %s, %d points a forward, tiles of %d rows and %d pairs, %d slots, "
        "predictor %s",
        version("flowprefill"),
        settings.live.policy,
        settings.live.preemption,
        runner.num_points["operator"],
        limits.rows,
        limits.attention_pairs,
        num_slots,
        predictor.coefficients,
    )
    try:
        loop.run()
    finally:
        channel.close()


def _steps(
    executor: Any, settings: CoreSettings, clock: MonotonicClock
) -> tuple[StepRunner, StepPool, Callable[[Callable[[Any], None]], None]]:
    """Where steps run, and how to hear of KV transfers that end meanwhile. Raises InvalidConfiguration."""
    if isinstance(executor, RankedExecutor):
        ranked = executor.ranked_pool(clock, settings.slots)
        return ranked, ranked, ranked.connect_news
    if not isinstance(executor, InProcessExecutor):
        accepted = [f"{kind.__module__}.{kind.__qualname__}" for kind in (InProcessExecutor, RankedExecutor)]
        raise InvalidConfiguration(
            f"--distributed-executor-backend gives {type(executor).__name__}; accepted are {accepted[0]} for one rank and "
            f"{accepted[1]} for several"
        )
    worker = executor.preemptive_worker
    engine = StepEngine(worker, worker.thread_context)

    def connect_news(on_news: Callable[[Any], None]) -> None:
        worker.tell_connector_news = on_news

    return engine, TaskPool(engine, clock, skip_cancelled=False), connect_news


def engine_spec(core: Any, settings: CoreSettings) -> EngineSpec:
    """What the engine says of itself."""
    config = core.vllm_config
    model, parallel = config.model_config, config.parallel_config
    hf = model.hf_text_config
    num_kv_heads, head_dim = model.get_total_num_kv_heads(), model.get_head_size()
    num_layers = model.get_num_layers(parallel)
    eos = getattr(hf, "eos_token_id", None)
    return EngineSpec(
        engine="vllm",
        model=settings.model or str(model.model),
        revision=settings.revision or str(model.revision or ""),
        device=str(config.device_config.device_type),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        block_size=core.scheduler.block_size,
        num_kv_blocks=core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_block_bytes=2
        * num_layers
        * core.scheduler.block_size
        * num_kv_heads
        * head_dim
        * model.dtype.itemsize,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        tensor_parallel_size=parallel.tensor_parallel_size,
    )


def _emit(core: Any, outputs: Any) -> None:
    core._attach_weight_version(outputs)
    for output in outputs.items():
        core.output_queue.put_nowait(output)
