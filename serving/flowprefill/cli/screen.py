"""One screen of truth about the services on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from flowprefill_operator.node.insight import ClassView, EngineView, View
    from flowprefill_operator.node.state import PodReport


PLAIN_WIDTH = 160


def show(views: Sequence[View], console: Console | None = None) -> None:
    """Print each service: its state, its classes, its pods and what is wrong with them."""
    console = console or _console()
    for position, view in enumerate(views):
        if position:
            console.print()
        _show_one(view, console)


def _console() -> Console:
    """The terminal; where there is none, wide enough for whole rows."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _show_one(view: View, console: Console) -> None:
    status = view.status
    head = Text.assemble((f"{status.namespace}/{status.service}", "bold"), "  ", _state(view))
    if view.running:
        head.append(f"  {status.url}/v1" if status.url else "")
        head.append(
            f"  revision {status.revision}  generation {status.generation}  policy {view.policy}", "dim"
        )
        head.append("  paused" if status.paused else "", "yellow")
    console.print(head, soft_wrap=True)
    if not view.running:
        return
    for words in (status.rollout, status.error):
        if words:
            console.print(Text(f"  {words}", "yellow"), soft_wrap=True)
    console.print(_classes(view.classes))
    console.print(_pods(view))
    for pod in status.pods:
        if not pod.ready and pod.message:
            console.print(Text.assemble((f"  {pod.name}: ", "bold"), (pod.message, "yellow")), soft_wrap=True)
        if line := view.last_lines.get(pod.name):
            console.print(Text(f"    last line of its log: {line}"), soft_wrap=True)


def _state(view: View) -> tuple[str, str]:
    if not view.running:
        return "not running", "dim"
    if view.status.stopping:
        return "stopping", "yellow"
    return ("ready", "green") if view.status.ready else ("not ready", "red")


def _classes(classes: Sequence[ClassView]) -> Table:
    table = _table("SLO class", "TTFT SLO", "objective", "attainment", "last 5 min", "requests")
    for slo in classes:
        table.add_row(
            slo.name,
            f"{slo.ttft_milliseconds} ms",
            f"{slo.objective} %",
            _share(slo.met, slo.missed, slo.objective),
            _share(slo.recently_met, slo.recently_missed, slo.objective),
            str(slo.met + slo.missed),
        )
    return table


def _share(met: int, missed: int, objective: str) -> Text:
    if met + missed == 0:
        return Text("-", "dim")
    percent = 100 * met / (met + missed)
    return Text(f"{percent:.1f} %", "green" if percent >= float(objective) else "red")


def _pods(view: View) -> Table:
    table = _table("pod", "state", "restarts", "age", "ports", "generation", "waiting", "KV used")
    for pod in view.status.pods:
        engine = view.engines.get(pod.name)
        table.add_row(
            pod.name,
            Text("Ready" if pod.ready else pod.phase, _colour(pod)),
            str(pod.restarts),
            age(time.time() - pod.started_at),
            " ".join(f"{name}:{port}" for name, port in pod.ports.items()),
            str(view.generations.get(pod.name, "-")),
            str(engine.waiting) if engine else "-",
            _kv(engine),
        )
    return table


def _kv(engine: EngineView | None) -> str:
    if engine is None or engine.kv_blocks == 0:
        return "-"
    return f"{1 - engine.kv_blocks_free / engine.kv_blocks:.0%} of {engine.kv_blocks} blocks"


def _colour(pod: PodReport) -> str:
    if pod.ready:
        return "green"
    return "red" if pod.phase.endswith(("CrashLoopBackOff", "CannotRun")) else "yellow"


def age(seconds: float) -> str:
    """A duration as kubectl shows ages: 45s, 12m, 3h, 2d."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(max(seconds, 0))}s"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table
