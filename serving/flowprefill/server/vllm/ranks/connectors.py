"""What the ranks' KV connectors say, as one: by vLLM's aggregator, which waits for every rank's word on a transfer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol


class Aggregator(Protocol):
    """vLLM's `KVOutputAggregator`."""

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        """`outputs[output_rank]` with the `kv_connector_output` of all."""
        ...


class ConnectorReports:
    """Any thread's. Without an aggregator (no KV connector) there is nothing to say."""

    def __init__(self, aggregator: Aggregator | None) -> None:
        self._aggregator = aggregator
        self._lock = threading.Lock()

    def joined(self, by_rank: Sequence[Any]) -> Any:
        """One `KVConnectorOutput` of these, None where a rank said nothing; None when nobody said anything."""
        if self._aggregator is None or all(said is None for said in by_rank):
            return None
        with self._lock:
            outputs = [SimpleNamespace(kv_connector_output=said) for said in by_rank]
            return self._aggregator.aggregate(outputs).kv_connector_output
