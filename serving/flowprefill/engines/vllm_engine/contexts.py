"""What vLLM keeps in module globals for the forward that runs: taken along by a task that stops, put back when it goes on.

| state | where vLLM keeps it |
| --- | --- |
| forward context (attention metadata, slot mapping) | `vllm.forward_context._forward_context` |
| metadata bound to the KV connector for this step | `_connector_metadata` of the process's connector |

Everything else that a forward needs later lies in its slot's runner (`slots.py`) or on its own stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm import forward_context
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """The globals of one forward in flight. Any: vLLM's own objects, only carried."""

    forward: Any
    connector_metadata: Any


def take() -> TaskContext:
    """The globals as they are; afterwards they are as without a forward."""
    metadata = None
    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        metadata, connector._connector_metadata = connector._connector_metadata, None
    forward, forward_context._forward_context = forward_context._forward_context, None
    return TaskContext(forward=forward, connector_metadata=metadata)


def put(context: TaskContext) -> None:
    """Make these the globals again."""
    forward_context._forward_context = context.forward
    if has_kv_transfer_group():
        get_kv_transfer_group()._connector_metadata = context.connector_metadata
