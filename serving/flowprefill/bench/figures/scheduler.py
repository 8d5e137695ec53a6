"""Figures of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from flowprefill.bench.event_cost import event_cost_s
from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill.scheduling.settings import PolicyName


def events(_: Bench) -> Iterator[Row]:
    """What an event costs with a long queue."""
    ratios: dict[str, float] = {}
    for policy in get_args(PolicyName):
        few, many = event_cost_s(policy, 100), event_cost_s(policy, 10_000)
        ratios[policy] = many / few
    yield Row(
        name="cost of a scheduling event with 10,000 waiting over 100 waiting, worst policy",
        value=max(ratios.values()),
        op="<=",
        bar=3,
        command="flowprefill bench figures --only events",
        detail=", ".join(f"{policy} {ratio:.2f}" for policy, ratio in ratios.items()),
    )


FIGURES = (Figure(name="events", summary="cost of a scheduling event", minutes=0.5, measure=events),)
