"""A preemption point as an operator of torch, for models that run compiled.

torch.compile traces through replaced `forward` methods and keeps only what is a tensor operation: a plain call would run once, while
tracing. An operator that claims to change its tensor stays in the graph, in its place. It changes nothing.
"""

from __future__ import annotations

import torch

from flowprefill.engines.vllm_engine.stint import Stage

_stage: Stage | None = None


def use(stage: Stage) -> None:
    """The stage whose stint pauses; one worker a process."""
    global _stage
    _stage = stage


@torch.library.custom_op("flowprefill::point", mutates_args=("tensor",))
def point(tensor: torch.Tensor, fine: bool, meets: bool) -> None:
    """Pause here if asked to; `fine` says that the point follows an operator and not a layer, `meets` is as in `Stint.point`."""
    stint = _stage.stint if _stage is not None else None
    if stint is not None and (stint.granularity == "operator") == fine:
        stint.point(meets)


@point.register_fake
def _(tensor: torch.Tensor, fine: bool, meets: bool) -> None:
    return None
