from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowprefill.bench.figures.row import Bench, Figure, Row
from flowprefill.bench.figures.run import chosen, measure
from flowprefill.errors import InvalidConfiguration


def row(name: str, value: float) -> Row:
    return Row(name=name, value=value, op="<=", bar=1.0, command="flowprefill bench figures")


def figure(name: str, *values: float) -> Figure:
    def run(_: Bench) -> Iterator[Row]:
        for number, value in enumerate(values):
            yield row(f"{name} {number}", value)

    return Figure(name=name, summary="", minutes=0.1, measure=run)


BENCH = Bench(new_target=None, progress=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "op", "bar", "holds"),
    [(1.0, "<=", 1.0, True), (1.0, "<", 1.0, False), (0.9, ">=", 0.9, True), (0.9, ">", 0.9, False)],
)
def test_a_figure_on_its_bar_holds_only_when_the_bar_includes_it(value, op, bar, holds) -> None:  # type: ignore[no-untyped-def]
    assert Row(name="x", value=value, op=op, bar=bar, command="c").holds is holds


def test_rows_are_written_as_they_are_measured_with_their_provenance(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "figures.json"

    def breaks(_: Bench) -> Iterator[Row]:
        yield row("first", 0.5)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        measure([Figure(name="f", summary="", minutes=1, measure=breaks)], BENCH, output)
    body = json.loads(output.read_text())
    assert [(entry["name"], entry["holds"]) for entry in body["rows"]] == [("first", True)]
    assert {"commit", "versions", "processor", "python"} <= body.keys()


def test_rows_of_another_run_stay_only_if_nothing_else_changed(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    measure([figure("a", 0.5)], BENCH, output)
    measure([figure("b", 2.0)], BENCH, output)
    assert [entry["name"] for entry in json.loads(output.read_text())["rows"]] == ["a 0", "b 0"]
    output.write_text(json.dumps(json.loads(output.read_text()) | {"commit": "another"}))
    measure([figure("c", 0.1)], BENCH, output)
    assert [entry["name"] for entry in json.loads(output.read_text())["rows"]] == ["c 0"]


def test_an_unknown_figure_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfiguration, match="no figure 'z'; accepted are a, b"):
        chosen([figure("a"), figure("b")], ["z"])
    assert [f.name for f in chosen([figure("a"), figure("b")], ["b"])] == ["b"]
