"""Tells what happens to a service while somebody waits for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from flowprefill_operator.node.state import NodeStatus, PodReport


class Narrator:
    """Prints one line for each change of a pod, and the address once the service is ready."""

    def __init__(self, *, foreground: bool) -> None:
        self._console = Console(highlight=False)
        self._foreground = foreground
        self._started_s = time.monotonic()
        self._told: dict[str, tuple[str, bool, str]] = {}
        self._ready = False
        self._stopping = False

    def skip(self, status: NodeStatus | None) -> None:
        """Take a status as known."""
        for pod in status.pods if status else ():
            self._told[pod.name] = (pod.phase, pod.ready, _trouble(pod))

    def tell(self, status: NodeStatus) -> None:
        """Print what is new in `status`."""
        if status.stopping and not self._stopping:
            self._stopping = True
            self._line("", "stopping; Ctrl-C again to stop at once" if self._foreground else "stopping")
        if status.error:
            self._line("", f"[red]{_plain(status.error)}[/]")
        for pod in status.pods:
            now = (pod.phase, pod.ready, _trouble(pod))
            if self._told.get(pod.name) != now:
                self._told[pod.name] = now
                self._line(pod.name, _words(pod))
        for name in set(self._told) - {pod.name for pod in status.pods}:
            del self._told[name]
            self._line(name, "gone")
        if status.ready and not self._ready:
            self._line("", f"[bold]ready[/] at [bold]{status.url}/v1[/]")
            if self._foreground:
                self._line("", "Ctrl-C stops it; `flowprefill status` in another terminal shows it")
        self._ready = status.ready

    def _line(self, name: str, words: str) -> None:
        passed = f"{time.monotonic() - self._started_s:6.1f} s"
        self._console.print(f"[dim]{passed}[/]  {name}{'  ' if name else ''}{words}", soft_wrap=True)


def _words(pod: PodReport) -> str:
    if pod.ready:
        return "[green]ready[/]"
    trouble = _trouble(pod)
    if trouble:
        return f"[red]{pod.phase}[/] {_plain(trouble)}"
    return pod.phase.lower()


def _trouble(pod: PodReport) -> str:
    """Why the pod fails; a probe that does not answer yet is no news while a process starts."""
    failing = pod.phase.endswith(("CrashLoopBackOff", "CannotRun")) or pod.phase == "Waiting"
    return pod.message if failing else ""


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
