"""Who may wait: the bounded queue, prompts that can never fit, and classes that would rather be told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowprefill.request import Request
from flowprefill.scheduling.actions import Outcome
from flowprefill.scheduling.kv import KVAccounting
from flowprefill.scheduling.settings import SchedulerSettings
from flowprefill.scheduling.state import WaitingRequest


def check_ids(requests: Iterable[Request], in_use: Callable[[str], bool]) -> None:
    """Raises ValueError when an arriving id is in use already or comes twice."""
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen or in_use(request.request_id):
            raise ValueError(
                f"request id {request.request_id!r} is in use; an id is free again once its request has finished "
                f"and its KV was given back"
            )
        seen.add(request.request_id)


def refusal(
    waiting: WaitingRequest,
    *,
    settings: SchedulerSettings,
    kv: KVAccounting,
    num_waiting: int,
    slack_s: float,
) -> tuple[Outcome, str] | None:
    """Outcome and reason when the request may not wait; None when it may.

    Decode steps are never refused: their answers are under way already, and the server bounds their number.
    """
    request = waiting.request
    if request.kind == "decode":
        return None
    needed = kv.num_blocks_for(request.num_prompt_tokens)
    if needed > kv.num_blocks:
        return "rejected", f"the prompt needs {needed} KV blocks; the pool has {kv.num_blocks}"
    if num_waiting >= settings.queue_limit:
        return "rejected", f"{num_waiting} requests wait already; the queue takes {settings.queue_limit}"
    if request.shed_when_infeasible and slack_s <= 0.0:
        return "shed", f"the TTFT target would be missed by {-slack_s:.3f} s even if it ran at once"
    return None
