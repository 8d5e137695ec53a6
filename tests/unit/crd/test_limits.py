"""What the CRD limits, Python limits too: each limit of the schema is overstepped once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill_crd import InvalidService, parse_service
from flowprefill_crd.crd import root_schema
from support.services import changes, document, is_leaf, nodes, spec_schema, text_path, with_value


def over_limits() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """For every leaf: its path, a valid spec around it, and a value just outside what the CRD accepts."""
    for name, node, before, _ in changes():
        for kind, value in outside(node):
            yield f"{name}-{kind}", with_value(before, parts(name), value), name


def outside(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that the node forbids, each with the name of the keyword that forbids it."""
    if "enum" in node:
        yield "enum", "not-one-of-them"
    if "minimum" in node:
        yield "minimum", node["minimum"] - 1
        yield "type", str(node["minimum"])
    if "maximum" in node:
        yield "maximum", node["maximum"] + 1
    if node.get("type") == "boolean":
        yield "type", "true"
    if node.get("type") == "string":
        yield "type", 1
    if "pattern" in node:
        yield "pattern", "not ok"
    if "maxLength" in node and not node.get("x-kubernetes-int-or-string"):
        yield "maxLength", "9" * (node["maxLength"] + 1)
    if "minLength" in node:
        yield "minLength", ""
    if "maxItems" in node:
        options = node["items"].get("enum", [f"item{i}" for i in range(node["maxItems"] + 1)])
        yield "maxItems", [options[i % len(options)] for i in range(node["maxItems"] + 1)]
    if "maxProperties" in node:
        yield "maxProperties", {f"key{i}": "1" for i in range(node["maxProperties"] + 1)}
        for kind, value in outside(node["additionalProperties"]):
            yield f"value-{kind}", {"key": value}


def parts(name: str) -> tuple[str | int, ...]:
    """The steps of a path such as `sloClasses[0].name`."""
    return tuple(
        int(step) if step.isdigit() else step for step in name.replace("[", ".").replace("]", "").split(".")
    )


@pytest.mark.parametrize(
    ("spec", "path"), [pytest.param(spec, path, id=name) for name, spec, path in over_limits()]
)
def test_python_refuses_what_the_crd_refuses(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidService) as error:
        parse_service(document(spec))
    assert any(problem.path.startswith(f"spec.{path}") for problem in error.value.problems), str(error.value)


def test_every_value_of_the_spec_is_bounded() -> None:
    unbounded = []
    for path, node in nodes(spec_schema()):
        for part in (node, node.get("items", {}), node.get("additionalProperties", {})):
            match part:
                case {"type": "integer"} if "minimum" not in part or "maximum" not in part:
                    unbounded.append(text_path(path))
                case {"type": "string"} if "maxLength" not in part and "enum" not in part:
                    unbounded.append(text_path(path))
                case {"type": "array"} if "maxItems" not in part:
                    unbounded.append(text_path(path))
                case {"additionalProperties": _} if "maxProperties" not in part:
                    unbounded.append(text_path(path))
    assert unbounded == []


def test_every_list_and_text_of_the_status_is_bounded() -> None:
    status = root_schema()["properties"]["status"]
    unbounded = [
        text_path(path)
        for path, node in nodes(status)
        if (node.get("type") == "string" and "maxLength" not in node and "enum" not in node)
        or (node.get("type") == "array" and "maxItems" not in node)
    ]
    assert unbounded == []


def test_a_class_list_of_0_or_17_is_refused() -> None:
    for classes in ([], [{"name": f"c{i}", "ttftMilliseconds": 1, "default": i == 0} for i in range(17)]):
        with pytest.raises(
            InvalidService, match=r"spec\.sloClasses: .* is not accepted; use a list of 1 to 16 items"
        ):
            parse_service(document({"model": {"uri": "embedded://x"}, "sloClasses": classes}))


def test_every_leaf_has_limits_that_this_file_oversteps() -> None:
    """Free-form objects aside, nothing in the spec takes any value."""
    free = [
        text_path(path)
        for path, node in nodes(spec_schema())
        if is_leaf(node) and next(outside(node), None) is None
    ]
    assert free == ["prefill.podTemplate.spec", "decode.podTemplate.spec", "proxy.podTemplate.spec"]
