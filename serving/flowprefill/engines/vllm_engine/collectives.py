"""Which operators hold the ranks of a split model together.

After an all-reduce all ranks have entered it, so the first point behind one is a place where they can meet: none can be beyond the
next while one of them has not come there. Only what is certain counts: an operator that is missing here costs a little time
until ranks meet, one that is here without a collective would let them miss each other.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import RowParallelLinear


def has_collective(module: nn.Module) -> bool:
    """Whether each forward of this operator or layer has all ranks enter a collective."""
    return any(_has_one(part) for part in module.modules())


def _has_one(module: nn.Module) -> bool:
    if isinstance(module, RowParallelLinear):
        return bool(module.reduce_results and module.tp_size > 1)
    if isinstance(module, MoERunner):
        config = module.moe_config
        split = config.tp_size > 1 or config.ep_size > 1
        return bool(split and not config.is_sequence_parallel and not config.skip_final_all_reduce)
    return False
