"""Our part of vLLM's `--additional-config`: `{"flowprefill": {...}}`. Everything has a default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.profile import Profile
from flowprefill_crd import LiveConfig
from flowprefill_crd.podconfig import LiveSloClass

DEFAULT_LIVE = LiveConfig(
    generation=0,
    slo_classes=(
        LiveSloClass(
            name="default",
            default=True,
            ttft_milliseconds=1000,
            min_ttft_milliseconds=1,
            max_ttft_milliseconds=3_600_000,
            tbt_milliseconds=100,
        ),
    ),
)
"""What a plain `vllm serve` with our flags works by: one class with a TTFT target of 1 s."""


class CoreSettings(BaseModel):
    """What the engine core's side reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    live: LiveConfig = DEFAULT_LIVE
    """The live document as it was at the start; changes come over the channel."""

    channel: str | None = None
    """Path of the parent process's socket; without one nobody is told anything."""

    profile: Profile | None = None
    """Prefill times measured before; measured at the start when absent."""

    model: str = ""
    revision: str = ""
    """What the state and the profile call the model."""

    slots: int = Field(default=9, ge=1, le=256)
    """Steps that can be in flight: one more than can be suspended."""

    max_gap_milliseconds: int = Field(default=20, ge=1, le=10_000)
    """Longest time between two points, in milliseconds: longer operators are cut into tiles."""

    operator_tile_tokens: int | None = Field(default=None, ge=16, le=131_072)
    """Most token rows of one tile; by the measured prefill times and `max_gap_milliseconds` when absent."""

    warm_up_seconds: float = Field(default=10.0, ge=0.0, le=600.0)
    """How long measuring prefill times may take."""


def core_settings(section: Mapping[str, Any]) -> CoreSettings:
    """Raises InvalidConfiguration, naming the field, the value and what is accepted."""
    try:
        return CoreSettings.model_validate_json(json.dumps(dict(section)))  # the documents are strict JSON
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidConfiguration(
            f'--additional-config "flowprefill": {where}: {first["msg"]}; got {str(first["input"])[:200]!r}'
        ) from None
