"""The scheduler's part of the live document."""

from __future__ import annotations

from flowprefill.scheduling.settings import Ageing, SchedulerSettings
from flowprefill_crd import LiveConfig


def scheduler_settings(live: LiveConfig) -> SchedulerSettings:
    """What the scheduler takes from `live`. Raises `ValueError` when its fields do not fit together."""
    return SchedulerSettings(
        policy=live.policy,
        preemption=live.preemption,
        batch_token_budget=live.batch_token_budget,
        chunk_tokens=live.chunk_tokens,
        max_suspended=live.max_suspended,
        recompute_suspended=live.recompute_suspended_under_pressure,
        ageing=(
            Ageing(factor=float(live.ageing.factor), share=live.ageing.share_percent / 100)
            if live.ageing.enabled
            else None
        ),
        queue_limit=live.queue_limit,
        online_correction=live.online_correction,
    )


def checked(live: LiveConfig) -> LiveConfig:
    """`live`, when a scheduler can work by it. Raises `ValueError`."""
    scheduler_settings(live)
    return live
