"""`flowprefill profile`: measure an engine's prefill times once, and hand them over in a few kilobytes.

Kubernetes keeps at most 4,096 bytes of what a container writes as its last words; the profile of a Job comes back that
way, and so does the reason when there is none.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from flowprefill.engines.registry import load_engine
from flowprefill.engines.simulated.engine import SimulatedEngine
from flowprefill.errors import FlowPrefillError, InvalidConfiguration, reason_of
from flowprefill.hosting.documents import read_pod_config
from flowprefill.logs import configure_logging
from flowprefill.scheduling.profile import Profile
from flowprefill.server.profiling import measure_profile, simulated_profile
from flowprefill_crd import PodConfig

log = logging.getLogger(__name__)

LIMIT_BYTES = 4096
BUDGET_S = 60.0
"""Measuring may take longer than in a pod that others wait for, and so reaches longer prompts."""
SIGNIFICANT_DIGITS = 5


def run(config_path: Path, output: Path | None) -> int:
    """Measure as a prefill pod does before it is ready, and longer; returns the exit status.

    `output` (standard output when None) gets the profile, or on failure the reason as plain text, and the status is 1.
    """
    try:
        config = read_pod_config(config_path)
        configure_logging(config.log_format)
        text = compact_json(measured(config))
    except (
        Exception
    ) as error:  # the top of the command: whatever went wrong is to be told where it is looked for
        if not isinstance(error, FlowPrefillError):
            log.exception("no profile")
        reason = str(error) if isinstance(error, FlowPrefillError) else reason_of(error)
        log.error("no profile", extra={"reason": reason})
        if output is not None:
            _write(output, _cut(reason))
        return 1
    if output is None:
        print(text)  # noqa: T201  # the command's result
    else:
        _write(output, text)
    return 0


def measured(config: PodConfig) -> Profile:
    """The profile of the engine that `config` names; a file it names is not looked at."""
    log.info("the model is loaded", extra={"model": config.model.uri, "engine": config.engine.type})
    engine = load_engine(config)
    try:
        log.info("prefill times are measured", extra={"device": engine.spec.device})
        if isinstance(engine, SimulatedEngine):
            return simulated_profile(engine)
        return measure_profile(engine, budget_s=BUDGET_S)
    finally:
        engine.close()


def compact_json(profile: Profile, *, limit_bytes: int = LIMIT_BYTES) -> str:
    """`profile` as JSON of at most `limit_bytes`: its samples, thinned evenly where they are too many.

    Seconds are rounded to five digits, and what has its default value is left out. Raises `InvalidConfiguration` when not
    even one sample fits.
    """
    body = profile.model_dump(mode="json", exclude_defaults=True)
    samples = [
        each | {"seconds": float(f"{each['seconds']:.{SIGNIFICANT_DIGITS}g}")} for each in body["samples"]
    ]
    fitting, too_many = 0, len(samples) + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fits = len(_json(body, _thinned(samples, middle)).encode()) <= limit_bytes
        fitting, too_many = (middle, too_many) if fits else (fitting, middle)
    if not fitting:
        raise InvalidConfiguration(
            f"a profile with provenance {body['provenance']} and one sample has more than {limit_bytes} bytes"
        )
    return _json(body, _thinned(samples, fitting))


def _thinned(samples: list[Any], count: int) -> list[Any]:
    """`count` of the samples, the first and (of two or more) the last among them, as far apart as can be."""
    if count == 1:
        return samples[:1]
    last = len(samples) - 1
    return [samples[round(position * last / (count - 1))] for position in range(count)]


def _json(body: dict[str, Any], samples: list[Any]) -> str:  # Any: a model's dump
    return json.dumps({**body, "samples": samples}, separators=(",", ":"), ensure_ascii=False)


def _cut(text: str) -> str:
    """At most `LIMIT_BYTES` of a text, whole characters."""
    return text.encode()[:LIMIT_BYTES].decode(errors="ignore")


def _write(output: Path, text: str) -> None:
    # In place: a termination log is a mounted file, which nothing can be renamed over.
    output.write_text(text, encoding="utf-8")
