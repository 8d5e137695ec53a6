"""Finds out what a directory holds, loads it with transformers and learns what runs inside its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.engines.torch_engine.attention import NAME, attention_forward
from flowprefill.engines.torch_engine.experts import experts_forward, run_expert
from flowprefill.engines.torch_engine.layout import Tile
from flowprefill.engines.torch_engine.run_state import Runtime
from flowprefill.engines.torch_engine.trace import LayerTrace, ModelTrace, Op
from flowprefill.errors import ModelNotLoadable

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
UNSUPPORTED_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the batch's longest position: packed and tiled runs would differ."""

NUM_PROBE_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its runtime attached, not yet instrumented.

    `linears` are the operators inside layers that the trace counts points for, `heads` those after the last layer.
    """

    model: Any  # transformers' models have no common typed base beyond nn.Module
    layers: tuple[nn.Module, ...]
    linears: tuple[nn.Linear, ...]
    heads: tuple[nn.Linear, ...]
    runtime: Runtime
    trace: ModelTrace


def read_config(path: Path) -> Any:
    """The model's configuration, checked for what the engine cannot run. Raises ModelNotLoadable."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ModelNotLoadable(f"{path} has no config.json; accepted is a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelNotLoadable(f"transformers cannot read {path / 'config.json'}: {error}") from error
    if config.is_encoder_decoder:
        raise ModelNotLoadable(
            f"{config.model_type} is an encoder-decoder; accepted are causal language models"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if kinds:
        raise ModelNotLoadable(
            f"{config.model_type} has layers of type {sorted(kinds)}; accepted are {sorted(SUPPORTED_LAYERS)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type in UNSUPPORTED_ROPE:
        raise ModelNotLoadable(
            f"rope_type is {rope_type}, which depends on the batch's longest position; accepted are fixed types"
        )
    return config


def load_model(path: Path, config: Any, dtype: torch.dtype | str, device: torch.device) -> LoadedModel:
    """Load weights, attach the runtime and trace the layers. Raises ModelNotLoadable."""
    import transformers
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(NAME, attention_forward)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    talk: Any = transformers.utils.logging  # untyped
    bars = talk.is_progress_bar_enabled()
    talk.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=NAME, local_files_only=True
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        raise ModelNotLoadable(f"transformers cannot load {path}: {error}") from error
    finally:
        if bars:
            talk.enable_progress_bar()
    model = model.to(device).eval().requires_grad_(False)
    model.config._experts_implementation = NAME
    return attach(model)


def attach(model: Any) -> LoadedModel:
    """Give every module the runtime and trace the model. Raises ModelNotLoadable when its layers do not fit the engine."""
    runtime = Runtime()
    for module in model.modules():
        object.__setattr__(module, "flowprefill_runtime", runtime)
    layers = find_layers(model)
    trace, linears, heads = trace_model(model, layers, runtime)
    return LoadedModel(model=model, layers=layers, linears=linears, heads=heads, runtime=runtime, trace=trace)


def find_layers(model: Any) -> tuple[nn.Module, ...]:
    """The decoder layers, in order."""
    count = model.config.num_hidden_layers
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and type(module[0]).__name__ in (model._no_split_modules or ())
    ]
    if len(found) != 1:
        raise ModelNotLoadable(
            f"{type(model).__name__} has {len(found)} lists of {count} decoder layers; accepted are models with one"
        )
    return tuple(found[0])


class Tracer:
    """Stands in for a task during one tiny forward and writes down which operators run. Implements `Run`."""

    def __init__(self, tensor_parallel_plan: dict[str, str]) -> None:
        self.fine = True
        self.layer: int | None = None
        self.ops: dict[int, list[Op]] = {}
        self.tail: list[Op] = []
        self.linears: dict[nn.Linear, None] = {}  # ordered; a shared one counts once
        self.heads: dict[nn.Linear, None] = {}
        self.shapes: set[tuple[int, int, int, int]] = set()
        self.head_rows: int | None = None
        self._reducing = [name for name, style in tensor_parallel_plan.items() if style.startswith("rowwise")]

    def point(self) -> None:
        return

    def layer_tiles(self) -> tuple[Tile, ...]:
        return (Tile(start=0, end=NUM_PROBE_ROWS, segments=()),)

    def start_tile(self, layer: int, tile: int) -> None:
        self.layer = layer

    def sampled_rows(self) -> Tensor | None:
        return None

    def reduces(self, name: str) -> bool:
        """Whether the tensor parallel plan ends the module of this name, within a layer, in a collective."""
        return any(
            pattern.split(".*.")[-1].removesuffix(".down_proj" if name.endswith("experts") else "") == name
            for pattern in self._reducing
        )

    def linear(self, module: nn.Linear, name: str) -> None:
        if self.layer is None:
            return  # before the layers: no points there
        op = Op(kind="linear", flops_per_row=2 * module.weight.numel(), reduces=self.reduces(name))
        if self.layer < 0:
            self.heads[module] = None
            self.tail.append(op)
        else:
            self.linears[module] = None
            self.ops.setdefault(self.layer, []).append(op)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        assert self.layer is not None, "attention runs inside a layer"
        if module.layer_idx != self.layer:
            raise ModelNotLoadable(
                f"layer {self.layer} calls itself {module.layer_idx}; accepted are layers numbered in order"
            )
        if not getattr(module, "is_causal", True):
            raise ModelNotLoadable(
                f"{type(module).__name__} is not causal; accepted is causal self-attention"
            )
        self.shapes.add((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        self.ops.setdefault(self.layer, []).append(Op(kind="attention", window=window))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        ).transpose(1, 2)

    def run_experts(self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert self.layer is not None, "experts run inside a layer"
        run_expert(module, 0, hidden[:1])  # an unusual layout of weights fails here, at load time
        weights = sum(parameter.numel() for parameter in module.parameters())
        top_k = top_k_index.shape[1]
        self.ops.setdefault(self.layer, []).append(
            Op(
                kind="experts",
                flops_per_row=2 * weights * top_k // module.num_experts,
                num_experts=module.num_experts,
                top_k=top_k,
                reduces=self.reduces("mlp.experts"),
            )
        )
        return torch.zeros_like(hidden)


def trace_model(
    model: Any, layers: Sequence[nn.Module], runtime: Runtime
) -> tuple[ModelTrace, tuple[nn.Linear, ...], tuple[nn.Linear, ...]]:
    """Run a few tokens through the model and note what runs in each layer and after the last one.

    Returns the trace, the linear operators inside layers and those after the last one.
    """
    tracer = Tracer(dict(getattr(model, "tp_plan", None) or {}))
    handles = []

    def before_layer(index: int) -> Any:
        return lambda module, args: tracer.start_tile(index, 0)

    def before_linear(name: str) -> Any:
        return lambda module, args: tracer.linear(module, name)

    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(before_layer(index)))
    handles.append(layers[-1].register_forward_hook(lambda module, args, output: tracer.start_tile(-1, 0)))
    inside = {id(module): name for layer in layers for name, module in layer.named_modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(before_linear(inside.get(id(module), name))))
    runtime.active = tracer
    try:
        with torch.inference_mode():
            ids = torch.zeros((1, NUM_PROBE_ROWS), dtype=torch.int64, device=model.device)
            positions = torch.arange(NUM_PROBE_ROWS, device=model.device).unsqueeze(0)
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except (NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        raise ModelNotLoadable(f"{type(model).__name__} does not fit this engine: {error}") from error
    finally:
        runtime.active = None
        for handle in handles:
            handle.remove()
    traces = []
    for index in range(len(layers)):
        ops = tuple(tracer.ops.get(index, ()))
        attentions = sum(op.kind == "attention" for op in ops)
        if attentions != 1:
            raise ModelNotLoadable(
                f"layer {index} of {type(model).__name__} called attention {attentions} times; accepted are layers that call it once"
            )
        traces.append(LayerTrace(ops=ops))
    if len(tracer.shapes) != 1:
        raise ModelNotLoadable(
            f"layers differ in heads or widths: {sorted(tracer.shapes)}; accepted are equal layers"
        )
    heads, kv_heads, key_dim, value_dim = tracer.shapes.pop()
    if key_dim != value_dim:
        raise ModelNotLoadable(f"keys are {key_dim} wide and values {value_dim}; accepted are equal widths")
    trace = ModelTrace(
        layers=tuple(traces),
        tail=tuple(tracer.tail),
        num_kv_heads=kv_heads,
        group_size=heads // kv_heads,
        head_dim=key_dim,
    )
    return trace, tuple(tracer.linears), tuple(tracer.heads)
