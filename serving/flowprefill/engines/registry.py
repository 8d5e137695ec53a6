"""Engines by name. Each is imported only when it is asked for, so that a simulated pod never imports torch."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast

from flowprefill.clock import MonotonicClock, Timekeeper
from flowprefill.engines.protocol import Engine
from flowprefill.errors import InvalidConfiguration
from flowprefill_crd import PodConfig

log = logging.getLogger(__name__)

SIMULATED_KV_CACHE_TOKENS = 262_144
SIMULATED_MAX_MODEL_LEN = 131_072


class Tokenizer(Protocol):
    """What servers need of a tokenizer; see `engines.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def load_engine(config: PodConfig, *, clock: Timekeeper | None = None) -> Engine:
    """The engine that `config.engine.type` names, with its model loaded; minutes for a large one.

    `engine.args` are the engine's own options: `--device`, `--lookahead` for torch; `--cost`, `--variant` and
    `--scale` for simulated. `clock` is the simulated engine's. Raises ModelNotLoadable or InvalidConfiguration.
    """
    match config.engine.type:
        case "torch":
            return _torch(config)
        case "simulated":
            return _simulated(config, clock or MonotonicClock())
        case "vllm":
            raise InvalidConfiguration(
                "engine type 'vllm' runs inside vLLM's own server, not in this one; accepted here are torch, simulated"
            )


def load_tokenizer(config: PodConfig, engine: Engine) -> Tokenizer:
    """The tokenizer of the model that `engine` runs. Raises ModelNotLoadable."""
    if engine.spec.engine == "simulated":
        from flowprefill.engines.simulated.tokenizer import SimulatedTokenizer

        return SimulatedTokenizer()
    from flowprefill.engines import models

    return models.load_tokenizer(_model_path(config)[0])


class _Options(argparse.ArgumentParser):
    """Parses `engine.args`; a mistake is a configuration error and never ends the process."""

    def __init__(self, engine: str) -> None:
        super().__init__(prog=f"engine.args of {engine}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        accepted = ", ".join(option for action in self._actions for option in action.option_strings)
        raise InvalidConfiguration(f"{self.prog}: {message}; accepted are {accepted}")


def _simulated(config: PodConfig, clock: Timekeeper) -> Engine:
    from flowprefill.engines.simulated.engine import SimulatedEngine
    from flowprefill.engines.simulated.presets import preset
    from flowprefill.engines.simulated.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE

    options = _Options("simulated")
    options.add_argument("--cost", default="tiny")
    options.add_argument("--variant", default="measured")
    options.add_argument("--scale", type=float, default=1.0)
    given = options.parse_args(config.engine.args)
    if not given.scale > 0:
        options.error(f"--scale is {given.scale}, and a device takes some time: give a positive number")
    try:
        cost = preset(given.cost, given.variant)
    except ValueError as error:
        raise InvalidConfiguration(f"engine.args of simulated: {error}") from None
    block_size = config.engine.block_size
    kv_cache_tokens = config.engine.kv_cache_tokens or SIMULATED_KV_CACHE_TOKENS
    return SimulatedEngine(
        cost if given.scale == 1.0 else cost.scaled(given.scale),
        clock,
        num_kv_blocks=-(-kv_cache_tokens // block_size),
        block_size=block_size,
        max_model_len=min(config.model.max_model_len or SIMULATED_MAX_MODEL_LEN, kv_cache_tokens),
        max_gap_s=config.engine.max_gap_milliseconds / 1000,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_TOKEN_ID,),
        model=config.model.served_name,
        revision=config.model.revision or "simulated",
    )


def _torch(config: PodConfig) -> Engine:
    from flowprefill.engines.kv_size import default_kv_cache_tokens
    from flowprefill.engines.torch_engine.engine import TorchEngine

    options = _Options("torch")
    options.add_argument("--device", default="cpu")
    options.add_argument("--lookahead", type=int, default=3)
    given = options.parse_args(config.engine.args)
    path, name, revision = _model_path(config)
    engine = config.engine
    loaded = TorchEngine.load(
        path,
        dtype=engine.dtype,
        device=given.device,
        kv_cache_tokens=engine.kv_cache_tokens or default_kv_cache_tokens(path, dtype=engine.dtype),
        block_size=engine.block_size,
        threads=engine.threads,
        max_gap_s=engine.max_gap_milliseconds / 1000,
        tile_tokens=engine.operator_tile_tokens,
        max_model_len=config.model.max_model_len,
        model=name,
        revision=revision,
        lookahead=given.lookahead,
    )
    return cast(Engine, loaded)  # its `run` takes only the plans that it made itself


def _model_path(config: PodConfig) -> tuple[Path, str, str]:
    """Directory, name and revision of the model; fetched when it is not here yet."""
    from flowprefill.engines import models

    last_step = ""

    def progress(step: str, done: int, total: int | None) -> None:
        nonlocal last_step
        if step != last_step:
            last_step = step
            log.info("fetching the model", extra={"step": step, "model": config.model.uri})

    resolved = models.resolve_model(config.model.uri, config.model.revision, progress=progress)
    return resolved.path, resolved.name, resolved.revision
