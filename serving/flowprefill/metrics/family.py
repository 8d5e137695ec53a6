"""Metrics of one process that share their identifying labels, in a registry that is passed down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Family:
    """Makes metrics whose first labels are the same everywhere in the process (service, model_name, role).

    A scrape adds namespace and pod. `Labelled` children are bound to these values, so that callers name only
    the labels that vary.
    """

    def __init__(self, registry: CollectorRegistry, common: Mapping[str, str]) -> None:
        self._registry = registry
        self._common = dict(common)

    def counter(self, name: str, text: str, *labels: str) -> CounterFamily:
        metric = Counter(name, text, [*self._common, *labels], registry=self._registry)
        return CounterFamily(metric, self._common)

    def gauge(self, name: str, text: str, *labels: str) -> GaugeFamily:
        return GaugeFamily(Gauge(name, text, [*self._common, *labels], registry=self._registry), self._common)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> HistogramFamily:
        metric = Histogram(name, text, [*self._common, *labels], registry=self._registry, buckets=buckets)
        return HistogramFamily(metric, self._common)


class CounterFamily:
    """Call with the varying labels to get the counter."""

    def __init__(self, metric: Counter, common: Mapping[str, str]) -> None:
        self._metric = metric
        self._common = common

    def __call__(self, **labels: str) -> Counter:
        return self._metric.labels(**self._common, **labels)


class GaugeFamily:
    """Call with the varying labels to get the gauge."""

    def __init__(self, metric: Gauge, common: Mapping[str, str]) -> None:
        self._metric = metric
        self._common = common

    def __call__(self, **labels: str) -> Gauge:
        return self._metric.labels(**self._common, **labels)

    def forget(self, **labels: str) -> None:
        """Drop one child, so that its series ends."""
        self._metric.remove(*self._common.values(), *labels.values())


class HistogramFamily:
    """Call with the varying labels to get the histogram."""

    def __init__(self, metric: Histogram, common: Mapping[str, str]) -> None:
        self._metric = metric
        self._common = common

    def __call__(self, **labels: str) -> Histogram:
        return self._metric.labels(**self._common, **labels)
