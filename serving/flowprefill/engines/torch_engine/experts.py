"""A mixture of experts, group by group, with a point after each group.

transformers keeps all experts of a layer in one module of stacked weights and lets its forward be replaced through a
registry. This one runs experts in order, each on the rows routed to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flowprefill.engines.torch_engine.run_state import RunState


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function registered with transformers' ExpertsInterface.

    hidden_states [N, D], top_k_index and top_k_weights [N, K]; returns [N, D]. `module` is any experts module of
    transformers (their attributes have no common type): stacked weights and flags that say how they are laid out.
    """
    run = module.flowprefill_runtime.active
    assert run is not None, "model code runs only inside an engine's run"
    result: Tensor = run.run_experts(module, hidden_states, top_k_index, top_k_weights)
    return result


def run_groups(
    run: RunState, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """All experts in order, pausing between groups."""
    if run.fine:
        run.point()
    num_rows, top_k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)  # [N * K] pairs by expert
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()
    sources = order // top_k  # row of each pair
    pairs = torch.empty((num_rows * top_k, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
    start = 0
    for first, last in run.plan.groups(module.num_experts, num_rows * top_k):
        for expert in range(first, last):
            end = start + counts[expert]
            if end > start:
                pairs[start:end] = run_expert(module, expert, hidden.index_select(0, sources[start:end]))
            start = end
        if run.fine:
            run.point()
    pairs *= top_k_weights.reshape(-1)[order].unsqueeze(-1).to(pairs.dtype)
    by_row = torch.empty_like(pairs)
    by_row[order] = pairs
    # Summed over a fixed axis: the same order for every batch, unlike an indexed addition.
    return by_row.view(num_rows, top_k, -1).sum(dim=1).to(hidden.dtype)


def run_expert(module: Any, expert: int, rows: Tensor) -> Tensor:
    """One expert on `rows` [n, D]; returns [n, D]."""
    if module.has_gate:
        up = _linear(module, "gate_up_proj", expert, rows)
        inner = module._apply_gate(up)
    else:
        inner = module.act_fn(_linear(module, "up_proj", expert, rows))
    out = _linear(module, "down_proj", expert, inner)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return out


def _linear(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if module.is_transposed:
        out = torch.matmul(rows, weight)
        return out if bias is None else out + bias
    return torch.nn.functional.linear(rows, weight, bias)
