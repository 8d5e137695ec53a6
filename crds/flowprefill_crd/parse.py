"""From YAML to FlowPrefillService, with every problem named by its field."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flowprefill_crd.errors import InvalidService, Problem
from flowprefill_crd.v1alpha1.service import API_VERSION, KIND, FlowPrefillService
from flowprefill_crd.v1alpha1.status import Status

# Parsed YAML and JSON are `Any`: their shape is what is being checked here.

_SHOWN = 80


def parse_service(document: str | Mapping[str, Any]) -> FlowPrefillService:
    """The one service in a YAML or JSON text, or in a mapping such as the API server's answer.

    Raises `InvalidService`, whose message lists every problem.
    """
    if isinstance(document, str):
        services = parse_services(document)
        if len(services) != 1:
            raise _invalid(
                f"holds {len(services)} services; parse one at a time, or load the file with load_services"
            )
        return services[0]
    return _service(document, source="")


def load_services(path: str | Path, *, ignore_other_kinds: bool = False) -> tuple[FlowPrefillService, ...]:
    """The services in a YAML file, in its order, at least one.

    A document of another kind is a problem unless `ignore_other_kinds`. Raises `InvalidService`, whose
    message lists the problems of all documents.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise _invalid(f"cannot be read: {reason}", source=str(path)) from error
    return parse_services(text, source=str(path), ignore_other_kinds=ignore_other_kinds)


def parse_services(
    text: str, *, source: str = "", ignore_other_kinds: bool = False
) -> tuple[FlowPrefillService, ...]:
    """The services in a YAML text, as `load_services` finds them in a file; messages begin with `source`."""
    documents = [
        (number, item) for number, item in enumerate(_documents(text, source), start=1) if item is not None
    ]
    services: dict[tuple[str, str], FlowPrefillService] = {}
    problems: list[Problem] = []
    for number, document in documents:
        where = f"{source or 'text'}, document {number}" if len(documents) > 1 else source
        if ignore_other_kinds and isinstance(document, dict) and not _is_ours(document):
            continue
        try:
            service = _service(document, source=where)
        except InvalidService as error:
            problems += error.problems
            continue
        key = (service.metadata.namespace, service.metadata.name)
        if key in services:
            message = f'a second service "{key[1]}" in namespace "{key[0]}"; each name may be used once'
            problems.append(Problem(source=where, path="metadata.name", message=message))
        services[key] = service
    if problems:
        raise InvalidService(problems)
    if not services:
        raise _invalid(
            f"holds no {KIND}; write a document with apiVersion: {API_VERSION} and kind: {KIND}",
            source=source,
        )
    return tuple(services.values())


def _is_ours(document: Mapping[str, Any]) -> bool:
    """Whether the document claims to be a FlowPrefillService of any version, or does not say what it is."""
    group = str(document.get("apiVersion", API_VERSION)).partition("/")[0]
    return document.get("kind", KIND) == KIND or group == API_VERSION.partition("/")[0]


def _service(document: object, *, source: str) -> FlowPrefillService:
    if not isinstance(document, Mapping):
        raise _invalid(
            f"{shown(document)} is not accepted; use a mapping with apiVersion, kind, metadata and spec",
            source=source,
        )
    problems = list(_wrong_type(document, source))
    if problems:
        raise InvalidService(problems)
    body = {key: value for key, value in document.items() if key != "status"}
    try:
        text = json.dumps(_without_nulls(body), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"holds a value that JSON cannot express: {error}", source=source) from error
    try:
        service = FlowPrefillService.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidService(problems_of(error, FlowPrefillService, source=source)) from error
    return service.model_copy(update={"status": _status(document.get("status"))})


def _wrong_type(document: Mapping[str, Any], source: str) -> Iterator[Problem]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if field not in document:
            yield Problem(source=source, path=field, message=f"is missing; use {wanted}")
        elif document[field] != wanted:
            message = f"{shown(document[field])} is not accepted; use {wanted}"
            yield Problem(source=source, path=field, message=message)


def _status(status: object) -> Status | None:
    """The status, or None when it cannot be read: it is the operator's own output, which it writes anew."""
    if not isinstance(status, Mapping):
        return None
    try:
        return Status.model_validate_json(json.dumps(_without_nulls(status)), by_alias=True, by_name=False)
    except (ValidationError, TypeError, ValueError):
        return None


def _without_nulls(value: Any) -> Any:
    """The value without null fields, which the API server drops too; pod templates keep theirs."""
    if isinstance(value, Mapping):
        return {
            key: item if key == "podTemplate" else _without_nulls(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _own(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """The errors without those of a list that only counts as too short because its items are wrong."""
    locs = [error["loc"] for error in errors]
    for error in errors:
        loc = error["loc"]
        if error["type"] == "too_short" and any(o[: len(loc)] == loc and len(o) > len(loc) for o in locs):
            continue
        yield error


def problems_of(error: ValidationError, model: type[BaseModel], *, source: str) -> list[Problem]:
    """What pydantic found in a document of a model, in our words: the value seen and what the model's schema accepts."""
    from flowprefill_crd import schema  # only for messages: building it takes longer than a parse

    root = schema.schema_of(model)
    return [problem for details in _own(error.errors()) for problem in _problems(details, root, source)]


def _problems(details: ErrorDetails, root: dict[str, Any], source: str) -> Iterator[Problem]:
    """One error of pydantic as problems in our words."""
    from flowprefill_crd import schema

    loc = details["loc"]
    path = field_path(loc)
    match details["type"]:
        case "rules":
            for field, message in details["ctx"]["problems"]:
                yield Problem(
                    source=source, path=path if field is None else f"{path}.{field}", message=message
                )
            return
        case "extra_forbidden":
            message = _unknown_field(str(loc[-1]), loc[:-1], root)
        case "missing":
            node = schema.node_at(root, loc)
            message = "is missing" + (f"; use {schema.accepted(node)}" if node else "")
        case _:
            node = schema.node_at(root, loc)
            wanted = details["msg"] if node is None else f"use {schema.accepted(node)}"
            seen = details["input"]
            if details["type"] == "string_type" and isinstance(seen, int | float):
                wanted += " (put it in quotes)"
            message = f"{shown(seen)} is not accepted; {wanted}"
    yield Problem(source=source, path=path, message=message)


def _unknown_field(name: str, parent: tuple[str | int, ...], root: dict[str, Any]) -> str:
    from flowprefill_crd import schema

    known = list((schema.node_at(root, parent) or {}).get("properties", {}))
    close = difflib.get_close_matches(_letters(name), [_letters(option) for option in known], n=2, cutoff=0.7)
    if close:
        options = [option for letters in close for option in known if _letters(option) == letters]
        return f"unknown field; did you mean {' or '.join(options)}?"
    paths = _paths(root, "")
    elsewhere = [path for path in paths if _letters(path.rpartition(".")[2]) == _letters(name)]
    if elsewhere:
        return f"unknown field; did you mean {' or '.join(elsewhere[:3])}?"
    return f"unknown field; {field_path(parent) or 'the document'} has the fields {', '.join(known)}"


def _letters(name: str) -> str:
    """The name as it is compared: `max_batch_size` is a misspelt `maxBatchSize`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _paths(node: dict[str, Any], path: str) -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        if below == "status":
            continue
        yield below
        yield from _paths(child, below)
        yield from _paths(child.get("items", {}), f"{below}[]")


def field_path(loc: tuple[str | int, ...]) -> str:
    """The location as a path: `spec.sloClasses[1].name`, `spec.prefill.resources.limits[nvidia.com/gpu]`."""
    path = ""
    for step in loc:
        if isinstance(step, str) and re.fullmatch(r"[A-Za-z0-9_-]+", step):
            path += f".{step}" if path else step
        else:
            path += f"[{step}]"
    return path


def shown(value: object) -> str:
    """The value as JSON, cut to a length that fits a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _invalid(message: str, *, source: str = "", path: str = "") -> InvalidService:
    return InvalidService([Problem(source=source, path=path, message=message)])


class _Loader(yaml.SafeLoader):
    """YAML as the API server reads it: JSON types only, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in lines:
                problem = f'the key "{key_node.value}" appears twice, first in line {lines[key_node.value]}; keep one'
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            lines[key_node.value] = line
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _documents(text: str, source: str) -> list[Any]:
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _invalid(str(error.problem or error.context), source=source, path=where) from error
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, AttributeError) as error:
        # The last three are how PyYAML answers a value that contradicts its tag, such as `!!int x`.
        raise _invalid(f"is not YAML: {error}", source=source) from error
