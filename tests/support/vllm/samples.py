"""A page of metrics as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples by name and labels."""

    values: tuple[tuple[str, dict[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name with these labels among theirs; 0 when there is none."""
        return sum(
            value
            for found, having, value in self.values
            if found == name and labels.items() <= having.items()
        )

    def value(self, name: str, **labels: str) -> float:
        """As `total`, and there must be one. Raises AssertionError."""
        assert any(found == name for found, _, _ in self.values), f"no {name} in the metrics"
        return self.total(name, **labels)


def samples(text: str) -> Samples:
    """The samples on a page in Prometheus' text format."""
    return Samples(
        values=tuple(
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    )
