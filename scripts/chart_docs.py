"""Writes the chart's README and the descriptions in its values schema: `python scripts/chart_docs.py [--check]`.

The comments of values.yaml are the one text about each value: they become the table of README.md (whose prose is
README.md.in) and the descriptions of values.schema.json, which is otherwise written by hand. A value without a comment
or without a schema, and a schema without a value, is an error. Chart.yaml shows
Artifact Hub the quickstart sample. `--check` writes nothing and fails when a file is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "flowprefill"
SAMPLE = ROOT / "crds" / "samples" / "quickstart.yaml"
EXAMPLES = "  artifacthub.io/crdsExamples: |\n"
"""The last key of Chart.yaml; what follows it is the sample, as a list of one."""

WIDTH = 118
"""Values whose default is longer than this as JSON are shown as a word in the table."""

OF_HELM = {"global"}
"""Properties of the schema that Helm itself sets; they have no value in values.yaml."""


class ChartError(Exception):
    """values.yaml and values.schema.json do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One key of values.yaml. `section`: its keys are values of their own; otherwise it is set as a whole."""

    path: tuple[str, ...]
    comment: str
    default: object
    section: bool

    @property
    def name(self) -> str:
        return ".".join(self.path)


def values(text: str) -> tuple[Value, ...]:
    """All keys of values.yaml in their order. Raises `ChartError` for a key without a comment above it."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ChartError("values.yaml is no mapping")
    return tuple(_values(root, text.splitlines(), ()))


def _values(node: yaml.MappingNode, lines: list[str], above: tuple[str, ...]) -> Iterator[Value]:
    for key, value in node.value:
        path = (*above, str(key.value))
        comment = _comment(lines, key.start_mark.line)
        section = (
            isinstance(value, yaml.MappingNode)
            and bool(value.value)
            and bool(_comment(lines, value.value[0][0].start_mark.line))
        )
        if not comment and not section:
            raise ChartError(f"values.yaml: {'.'.join(path)} has no comment above it")
        default = yaml.SafeLoader("").construct_document(value)
        yield Value(path=path, comment=comment, default=default, section=section)
        if section:
            assert isinstance(value, yaml.MappingNode)
            yield from _values(value, lines, path)


def _comment(lines: list[str], line: int) -> str:
    """The block of comment lines right above a line, as one paragraph."""
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
    return " ".join(found)


def described(schema: dict[str, Any], known: tuple[Value, ...]) -> dict[str, Any]:
    """The schema with the comments as descriptions, and every key of a section required.

    Raises `ChartError` when one of the two files has a value that the other lacks.
    """
    filled: dict[str, Any] = json.loads(json.dumps(schema))
    for value in known:
        parent = _schema_of(filled, value.path[:-1])
        entry = parent["properties"].get(value.path[-1])
        if entry is None:
            raise ChartError(f"values.schema.json: {value.name} of values.yaml is missing")
        if value.comment:
            parent["properties"][value.path[-1]] = {"description": value.comment} | {
                name: part for name, part in entry.items() if name != "description"
            }
    for path in [(), *(value.path for value in known if value.section)]:
        section = _schema_of(filled, path)
        names = [value.path[-1] for value in known if value.path[:-1] == path]
        extra = set(section["properties"]) - set(names) - (set() if path else OF_HELM)
        if extra:
            shown = ", ".join(sorted(".".join((*path, name)) for name in extra))
            raise ChartError(f"values.yaml: {shown} of values.schema.json is missing")
        section["required"] = names
    return filled


def _schema_of(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for depth, name in enumerate(path, start=1):
        found = schema.get("properties", {}).get(name)
        if found is None or "properties" not in found:
            raise ChartError(f"values.schema.json: {'.'.join(path[:depth])} has no properties")
        schema = found
    return schema


def table(known: tuple[Value, ...], schema: dict[str, Any]) -> str:
    """A Markdown table of the values that can be set, in the order of values.yaml."""
    rows = ["| value | accepted | default | meaning |", "|---|---|---|---|"]
    for value in known:
        if value.section:
            continue
        entry = _schema_of(schema, value.path[:-1])["properties"][value.path[-1]]
        default = json.dumps(value.default, separators=(", ", ": "))
        shown = f"`{default}`" if len(default) <= WIDTH else "see values.yaml"
        cells = (f"`{value.name}`", accepted(entry), shown, value.comment)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def accepted(entry: Mapping[str, Any]) -> str:
    """What a value may be, in words. Objects of Kubernetes are named by what they are there."""
    match entry:
        case {"enum": [*choices]}:
            return ", ".join(f"`{choice}`" for choice in choices)
        case {"$ref": str(target)}:
            return _OF_DEFINITION.get(target.rsplit("/", 1)[-1], "string")
        case {"type": "integer", "minimum": low, "maximum": high}:
            return f"integer, {low} to {high}"
        case {"type": "array"}:
            return "list"
        case {"type": str(kind)}:
            return kind
    raise ChartError(f"values.schema.json: {dict(entry)} says no type")


_OF_DEFINITION = {"labels": "map of labels", "annotations": "map of annotations"}


def with_example(chart_yaml: str, sample: str) -> str:
    """Chart.yaml with the sample, less its introduction, as the one example. Raises `ChartError` where it has no place."""
    before, key, _ = chart_yaml.partition(EXAMPLES)
    if not key:
        raise ChartError(f"Chart.yaml: {EXAMPLES.split(':')[0].strip()} is missing")
    lines = list(dropwhile(lambda line: line.startswith("#"), sample.splitlines()))
    return (
        before + key + "".join(f"    {'  ' if number else '- '}{line}\n" for number, line in enumerate(lines))
    )


def files(chart: Path) -> dict[Path, str]:
    """The generated files of a chart and their content."""
    known = values((chart / "values.yaml").read_text(encoding="utf-8"))
    schema = described(json.loads((chart / "values.schema.json").read_text(encoding="utf-8")), known)
    chart_yaml = (chart / "Chart.yaml").read_text(encoding="utf-8")
    info = yaml.safe_load(chart_yaml)
    readme = (chart / "README.md.in").read_text(encoding="utf-8")
    for name, text in {
        "description": info["description"],
        "kubeVersion": str(info["kubeVersion"]).removesuffix("-0"),
        "values": table(known, schema),
    }.items():
        readme = readme.replace(f"@{name}@", text)
    return {
        chart / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        chart / "README.md": readme,
        chart / "Chart.yaml": with_example(chart_yaml, SAMPLE.read_text(encoding="utf-8")),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or compare them with `--check`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="chart_docs.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    parser.add_argument(
        "--chart", type=Path, default=CHART, help="folder of the chart (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        wanted = files(options.chart)
    except ChartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    stale = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not options.check:
            path.write_text(wanted[path], encoding="utf-8")
        sys.stderr.write(f"{path.name}: {'is stale; run make chart-docs' if options.check else 'written'}\n")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
