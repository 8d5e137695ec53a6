"""Cost models of known models on known devices.

Coefficients are fits `a + b k + c k^2` seconds (k thousand tokens, 64 to 16,384 tokens, error 4 to 17 %) to published
operator measurements of vLLM (AIConfigurator's tables). For the A800 they are A100 times with the host's share that the
FlowPrefill authors' logs show (11.5 ms + 1.07 x); the 8B model there is the 5 % quantile fit of their logged TTFTs.

Variant `measured` is these fits. Variant `paper-fig3` adds what figure 3 of the paper implies for its stack: 150 ms a
pass, 1.2 times the operators, and attention at 60 % of its speed. Under it small chunks are as slow as the paper shows;
under `measured` a chunked baseline is much stronger.

The split of b over the matrix products follows their FLOPs, which agrees with the measured tables within 15 %. Where a
model is split over devices, its two all-reduces take a seventh of b, as in the tables of both split models on A100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from flowprefill.engines.simulated.cost import CostModel, Operator

Variant = Literal["measured", "paper-fig3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder. `ffn` is the width of one expert where `experts` > 0, of which `experts_used` run."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    experts: int = 0
    experts_used: int = 0
    tensor_parallel_size: int = 1


ARCHITECTURES = {
    "llama3-8b": Architecture(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336),
    "qwen2.5-14b": Architecture(
        hidden=5120, layers=48, heads=40, kv_heads=8, ffn=13824, tensor_parallel_size=2
    ),
    "llama3-70b": Architecture(
        hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, tensor_parallel_size=4
    ),
    "qwen3-30b-a3b": Architecture(
        hidden=2048, layers=48, heads=32, kv_heads=4, ffn=768, experts=128, experts_used=8
    ),
}

MEMORY_BYTES_PER_S = {"a100": 2.04e12, "a800": 2.04e12, "h100": 3.35e12, "h200": 4.8e12}

FITS = {
    "a100": {
        "llama3-8b": (0.0077, 0.0538, 0.00162),
        "qwen2.5-14b": (0.0106, 0.0661, 0.00132),
        "llama3-70b": (0.0238, 0.1746, 0.00160),
        "qwen3-30b-a3b": (0.0368, 0.0372, 0.00239),
    },
    "h100": {
        "llama3-8b": (0.0049, 0.0162, 0.00077),
        "qwen2.5-14b": (0.0065, 0.0259, 0.00050),
        "llama3-70b": (0.0138, 0.0685, 0.00109),
        "qwen3-30b-a3b": (0.0221, 0.0084, 0.00080),
    },
    "h200": {
        "llama3-8b": (0.0036, 0.0168, 0.00073),
        "qwen2.5-14b": (0.0053, 0.0248, 0.00060),
        "llama3-70b": (0.0108, 0.0672, 0.00126),
        "qwen3-30b-a3b": (0.0165, 0.0078, 0.00075),
    },
}

ALL_REDUCE_SHARE = 0.072
"""Part of b that each of a layer's two all-reduces takes."""

A800_HOST_S = 0.0115
A800_OVER_A100 = 1.07
A800_LLAMA3_8B = (0.0202, 0.0524, 0.00302)

TINY = CostModel(
    name="tiny",
    num_layers=4,
    operators=(
        Operator(name="qkv", share=0.15),
        Operator(name="attention", attention=True),
        Operator(name="o", share=0.1, collective=True),
        Operator(name="gate_up", share=0.5),
        Operator(name="down", share=0.25, collective=True),
    ),
    fixed_s=0.002,
    linear_s=0.05,
    quadratic_s=0.002,
    kv_read_s=0.0005,
)
"""Four layers and milliseconds, for tests and demonstrations in real time."""


def preset_names() -> tuple[str, ...]:
    """Every name that `preset` accepts."""
    return ("tiny", *(f"{device}/{model}" for device in MEMORY_BYTES_PER_S for model in ARCHITECTURES))


def preset(name: str, variant: Variant = "measured") -> CostModel:
    """The cost model called `device/model`, or `tiny`. Raises ValueError for a name or variant that is not known."""
    if variant not in get_args(Variant):
        raise ValueError(
            f"no variant {variant!r} of a cost model; accepted are {', '.join(get_args(Variant))}"
        )
    if name not in preset_names():
        raise ValueError(f"no cost model {name!r}; accepted are {', '.join(preset_names())}")
    model = TINY if name == "tiny" else _from_fit(*name.split("/"))
    return model if variant == "measured" else _as_figure_3(model)


def _from_fit(device: str, model: str) -> CostModel:
    architecture = ARCHITECTURES[model]
    fixed_s, linear_s, quadratic_s = _coefficients(device, model)
    kv_heads = max(architecture.kv_heads // architecture.tensor_parallel_size, 1)
    kv_bytes_per_token = 2 * 2 * kv_heads * architecture.head_dim * architecture.layers
    return CostModel(
        name=f"{device}/{model}",
        num_layers=architecture.layers,
        operators=_operators(architecture),
        fixed_s=fixed_s,
        linear_s=linear_s,
        quadratic_s=quadratic_s,
        kv_read_s=1000 * kv_bytes_per_token / MEMORY_BYTES_PER_S[device],
        tensor_parallel_size=architecture.tensor_parallel_size,
    )


def _coefficients(device: str, model: str) -> tuple[float, float, float]:
    if device != "a800":
        return FITS[device][model]
    if model == "llama3-8b":
        return A800_LLAMA3_8B
    fixed_s, linear_s, quadratic_s = (A800_OVER_A100 * coefficient for coefficient in FITS["a100"][model])
    return fixed_s + A800_HOST_S, linear_s, quadratic_s


def _as_figure_3(model: CostModel) -> CostModel:
    slower = model.scaled(1.2)
    return replace(
        slower,
        name=f"{model.name} (paper-fig3)",
        fixed_s=slower.fixed_s + 0.150,
        quadratic_s=slower.quadratic_s / 0.6,
    )


def _operators(architecture: Architecture) -> tuple[Operator, ...]:
    """Core operators in order, with their share of the matrix products' FLOPs for one token."""
    a = architecture
    flops = {
        "qkv": 2 * a.hidden * (a.heads + 2 * a.kv_heads) * a.head_dim,
        "o": 2 * a.heads * a.head_dim * a.hidden,
    }
    if a.experts:
        flops["router"] = 2 * a.hidden * a.experts
        flops["experts"] = 6 * a.experts_used * a.hidden * a.ffn
    else:
        flops["gate_up"] = 4 * a.hidden * a.ffn
        flops["down"] = 2 * a.ffn * a.hidden
    total = sum(flops.values())
    is_split = a.tensor_parallel_size > 1
    products = 1.0 - 2 * ALL_REDUCE_SHARE if is_split else 1.0
    operators = []
    for name, count in flops.items():
        operators.append(Operator(name=name, share=products * count / total))
        if name == "qkv":
            operators.append(Operator(name="attention", attention=True))
        if is_split and name in ("o", "down", "experts"):
            operators.append(Operator(name=f"all_reduce_{name}", share=ALL_REDUCE_SHARE, collective=True))
    return tuple(operators)
