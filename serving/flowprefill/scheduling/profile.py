"""A profile: measured prefill times of one engine on one device, and where they come from."""

from __future__ import annotations

from datetime import date
from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ProfileSample(_Document):
    """One prefill pass of one request: tokens computed, tokens found in the prefix cache, seconds taken."""

    num_new: int = Field(ge=1)
    num_cached: int = Field(default=0, ge=0)
    seconds: float = Field(gt=0)


class Provenance(_Document):
    """What the samples were taken on. A profile predicts nothing for another engine, model or device."""

    model: str
    engine: str
    device: str
    dtype: str
    tensor_parallel_size: int = Field(default=1, ge=1)
    taken_on: date


class Profile(_Document):
    """Samples with their provenance; the JSON document a profiling run writes and a pod reads."""

    provenance: Provenance
    samples: tuple[ProfileSample, ...] = Field(min_length=1, max_length=10_000)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises pydantic's ValidationError, naming the field, when the document is not a profile."""
        return cls.model_validate_json(text)
