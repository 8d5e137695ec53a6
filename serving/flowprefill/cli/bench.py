"""`flowprefill demo`: the demonstration on the local node."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flowprefill.cli.problems import guarded
from flowprefill.cli.services import read_service
from flowprefill.cli.target import LocalTarget

SAMPLE = "quickstart.yaml"


def demo(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="FlowPrefillService with classes `chat` and `document`; - is standard input, the quickstart sample when left out.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, help="Least number of short requests in the load.")
    ] = 60,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the table as JSON, a row a request, and the environment."
        ),
    ] = Path("results/demo"),
) -> None:
    """Show what preemption buys: the same load with and without it, on a real model and this machine.

    Brings up a small service, measures how fast this machine is, replays short chat prompts and long documents at
    three quarters of that under slack-aware EDF with operator-level preemption and then under FCFS without, and
    prints how many TTFT promises were kept. Takes about three minutes, plus one to fetch the model the first time.
    """
    with guarded():
        from flowprefill.bench.demo import compare
        from flowprefill.bench.show import Screen, new_console, print_calibration, print_results, write_run
        from flowprefill.cli.progress import ProgressBar
        from flowprefill.engines.models import load_tokenizer, resolve_model
        from flowprefill_crd.samples import sample_path

        service = read_service(file or sample_path(SAMPLE))
        console = new_console()
        source = service.spec.model
        with ProgressBar(f"fetching {source.uri}") as bar:
            tokens = load_tokenizer(resolve_model(source.uri, source.revision, progress=bar.update).path)
        screen = Screen(console)
        with tempfile.TemporaryDirectory(prefix="flowprefill-demo-") as root:
            target = LocalTarget(Path(root), service)
            try:
                comparison = compare(
                    target,
                    service,
                    tokens,
                    screen,
                    num_short=requests,
                    on_calibrated=lambda calibration: print_calibration(console, calibration),
                )
            finally:
                screen.close()
                target.stop()
        print_results(console, comparison.systems)
        write_run(output, comparison)
        console.print(f"written to {output}/")
