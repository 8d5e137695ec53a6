"""What a request gets when it completes, put together from the results of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flowprefill.scheduling.actions import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPrefill:
    """A prompt whose KV is in place.

    `token_id` is the next token, by the item's own sampling. `block_ids` hold the KV of `num_tokens` prompt tokens, in
    order, until the request is released. `num_cached_tokens` of them were there before (prefix cache). `num_tasks` counts the
    batches that it took (chunks).
    """

    request_id: str
    token_id: int | None
    block_ids: tuple[int, ...]
    num_tokens: int
    num_cached_tokens: int
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedDecode:
    """A decode step that ran in a task: the next token of each sequence, in the step's order."""

    request_id: str
    token_ids: tuple[int | None, ...]


Finished: TypeAlias = FinishedPrefill | FinishedDecode


class ResultBook:
    """Collects results task by task. Owned by one thread."""

    def __init__(self) -> None:
        self._tasks: dict[int, Task] = {}
        self._first_start: dict[str, int] = {}
        self._num_tasks: dict[str, int] = {}
        self._finished: dict[str, Finished] = {}

    def submitted(self, task: Task) -> None:
        """`task` starts."""
        self._tasks[task.task_id] = task
        for item in task.items:
            self._first_start.setdefault(item.request_id, item.start)
            self._num_tasks[item.request_id] = self._num_tasks.get(item.request_id, 0) + 1

    def completed(self, task_id: int, results: Sequence[int | None]) -> Task:
        """`task_id` ended with one result per item; a decode step has one per sequence. Returns the task."""
        task = self._tasks.pop(task_id)
        if task.kind == "decode":
            request_id = task.items[0].request_id
            self._finished[request_id] = FinishedDecode(request_id=request_id, token_ids=tuple(results))
            return task
        for item, token_id in zip(task.items, results, strict=True):
            has_outcome = item.request_id not in self._first_start  # cancelled while its batch ran on
            if item.completes and not has_outcome:
                self._finished[item.request_id] = FinishedPrefill(
                    request_id=item.request_id,
                    token_id=token_id,
                    block_ids=item.block_ids,
                    num_tokens=item.start + item.num_tokens,
                    num_cached_tokens=self._first_start[item.request_id],
                    num_tasks=self._num_tasks[item.request_id],
                )
        return task

    def failed(self, task_id: int) -> Task:
        """`task_id` ended without results; its requests may start over. Returns the task."""
        task = self._tasks.pop(task_id)
        for item in task.items:
            self.forget(item.request_id)
        return task

    def take(self, request_id: str) -> Finished | None:
        """The result of a request that completed, once; None when there is none."""
        finished = self._finished.get(request_id)
        self.forget(request_id)
        return finished

    def forget(self, request_id: str) -> None:
        """Drop all that is known of a request."""
        self._finished.pop(request_id, None)
        self._first_start.pop(request_id, None)
        self._num_tasks.pop(request_id, None)
