"""What is local to a thread in torch, set for the length of a run in whichever thread it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def thread_context(
    device: torch.device, stream: torch.cuda.Stream | None, num_threads: int
) -> Iterator[None]:
    """Inference mode, thread count, device and stream for the calling thread.

    All tasks of an engine use one stream: what a parked task launched then precedes what its successor launches, so
    memory and workspaces are reused in order, without any synchronisation.
    """
    with ExitStack() as stack:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        stack.enter_context(torch.inference_mode())
        if stream is not None:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))
        yield


def use_threads(num_threads: int) -> None:
    """Bound torch's own threads for this process. Two busy-waiting threads on one busy core are 10 times slower than one."""
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            # Only possible before the first parallel work of the process; the launcher's environment covers that case.
            return
