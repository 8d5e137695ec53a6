"""The scheduler's settings from the live document."""

from __future__ import annotations

from flowprefill.scheduling.settings import Ageing, SchedulerSettings
from flowprefill.server.settings import scheduler_settings
from support.pods import live_config


def test_settings_follow_the_document() -> None:
    live = live_config(
        policy="moore-hodgson",
        batchTokenBudget=99,
        preemption="layer",
        chunkTokens=33,
        maxSuspended=3,
        recomputeSuspendedUnderPressure=False,
        queueLimit=77,
        ageing={"enabled": True, "factor": 6, "sharePercent": 10},
        onlineCorrection=False,
    )
    assert scheduler_settings(live) == SchedulerSettings(
        policy="moore-hodgson",
        preemption="layer",
        batch_token_budget=99,
        chunk_tokens=33,
        max_suspended=3,
        recompute_suspended=False,
        ageing=Ageing(factor=6.0, share=0.1),
        queue_limit=77,
        online_correction=False,
    )
    assert scheduler_settings(live_config(ageing={"enabled": False})).ageing is None
