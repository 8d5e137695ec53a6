"""What the ranks' KV connectors say, as one: by vLLM's aggregator, which waits for every rank's word on a transfer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from flowprefill.execution.collective import LEADER
from flowprefill.server.vllm.ranks.messages import Emptied, Ended


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

    def result(self, by_rank: Sequence[Ended | Emptied]) -> Any:
        """The leader's result with what all connectors said."""
        result = by_rank[LEADER].result
        said = self.joined([result.kv_connector_output, *(part.connector for part in by_rank[LEADER + 1 :])])
        if said is not None:
            result.kv_connector_output = said
        return result

    def left_behind(self, by_rank: Sequence[Ended]) -> Any:
        """What the connectors said in a step that gave no result; None when they said nothing."""
        return self.joined([part.connector for part in by_rank])

    def news(self, rank: int, said: Any, num_ranks: int) -> Any:
        """What is new to all by this rank's word of finished transfers; None when others have to say it as well."""
        found = self.joined([said if other == rank else None for other in range(num_ranks)])
        if found is None or not (found.finished_sending or found.finished_recving or found.failed_recving):
            return None
        return found
