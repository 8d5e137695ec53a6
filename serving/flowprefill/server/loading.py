"""What a pod loads before it is ready: engine, tokenizer, predictor."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from flowprefill.engines.protocol import Engine
from flowprefill.engines.registry import load_engine, load_tokenizer
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.predictor import Predictor, fit
from flowprefill.scheduling.profile import Profile
from flowprefill.server.profiling import measure_profile, simulated_profile, warm_decode
from flowprefill.server.text import Texts, Tokenizer
from flowprefill_crd import PodConfig

log = logging.getLogger(__name__)


MIN_DEFAULT_ANSWER = 256
"""Tokens that an answer without a limit of its own may have at least, in pods with little KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A pod's engine and what belongs to it. `predictor` and `profile` are there in roles that prefill."""

    engine: Engine
    texts: Texts
    predictor: Predictor | None
    profile: Profile | None

    @property
    def needed_predictor(self) -> Predictor:
        assert self.predictor is not None, "a pod that prefills has a predictor"
        return self.predictor


def load(config: PodConfig, role: str) -> Loaded:
    """Load all of it; minutes for a large model. Called in a thread.

    Raises `ModelNotLoadable` or `InvalidConfiguration`.
    """
    began_s = time.monotonic()
    engine = load_engine(config)
    return assemble(config, role, engine, load_tokenizer(config, engine), began_s=began_s)


def assemble(config: PodConfig, role: str, engine: Engine, tokenizer: Tokenizer, *, began_s: float) -> Loaded:
    """Put what is loaded together, with a profile where the role prefills."""
    spec = engine.spec
    # A colocated pod splits its blocks between prompts and answers, and each part must hold a whole request.
    num_kv_tokens = spec.num_kv_blocks // (2 if role == "colocated" else 1) * spec.block_size
    texts = Texts(
        tokenizer,
        max_model_len=min(spec.max_model_len, num_kv_tokens),
        default_answer_tokens=max(MIN_DEFAULT_ANSWER, num_kv_tokens // 8),
    )
    profile = None if role == "decode" else _profile(config, engine)
    if role != "prefill":
        warm_decode(engine)
    log.info(
        "model loaded",
        extra={
            "model": spec.model,
            "model_revision": spec.revision,
            "engine": spec.engine,
            "device": spec.device,
            "dtype": spec.dtype,
            "max_model_len": texts.max_model_len,
            "kv_blocks": spec.num_kv_blocks,
            "block_size": spec.block_size,
            "seconds": round(time.monotonic() - began_s, 2),
        },
    )
    predictor = None if profile is None else fit(profile)
    if predictor is not None:
        a, b, c, d = predictor.coefficients
        log.info("predictor fitted", extra={"a": a, "b": b, "c": c, "d": d})
    return Loaded(engine=engine, texts=texts, predictor=predictor, profile=profile)


def _profile(config: PodConfig, engine: Engine) -> Profile:
    """The profile in the configured file, else one measured now.

    A profile of another engine or tensor parallel size is refused; one of another model, device or number format is
    used with a warning, since online correction can bring it near.
    """
    file = config.predictor.profile_file
    if file is None and isinstance(engine, SimulatedEngine):
        return simulated_profile(engine)
    if file is None:
        # Without warm-up a few short passes still are needed: no deadline can be judged without a prediction.
        return measure_profile(engine) if config.predictor.warmup else measure_profile(engine, budget_s=0.0)
    profile = read_profile(file)
    taken, spec = profile.provenance, engine.spec
    if taken.engine != spec.engine or taken.tensor_parallel_size != spec.tensor_parallel_size:
        raise InvalidConfiguration(
            f"profile {file} was taken on engine {taken.engine!r} with tensor parallel size "
            f"{taken.tensor_parallel_size}; this pod runs {spec.engine!r} with {spec.tensor_parallel_size}"
        )
    differing = {
        name: f"{there} there, {here} here"
        for name, there, here in (
            ("model", taken.model, f"{spec.model}@{spec.revision}"),
            ("device", taken.device, spec.device),
            ("dtype", taken.dtype, spec.dtype),
        )
        if there != here
    }
    if differing:
        log.warning("the profile was taken elsewhere", extra={"path": file, **differing})
    return profile


def read_profile(file: str) -> Profile:
    """The profile in a file. Raises `InvalidConfiguration` naming the file and what is wrong."""
    try:
        return Profile.from_json(Path(file).read_bytes())
    except OSError as error:
        raise InvalidConfiguration(f"profile {file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidConfiguration(
            f"profile {file} is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
