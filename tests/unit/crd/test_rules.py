"""Every cross-field rule is broken once, in Python, and stands in the CRD as CEL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from flowprefill_crd import InvalidService, parse_service
from flowprefill_crd.rules import Rule, Rules
from flowprefill_crd.v1alpha1 import Spec
from support.bad_services import BAD_SERVICES, BadService
from support.services import MINIMAL_SPEC, document, merged, nodes, spec_schema, text_path


def python_rules(model: type[BaseModel] = Spec, path: str = "") -> Iterator[tuple[str, Rule]]:
    """Every rule that the models declare, with the path of the value it is about."""
    for rule in getattr(model, "rules", ()):
        yield path, rule
    for field in model.model_fields.values():
        below = f"{path}.{field.alias}".lstrip(".")
        for annotation in _annotations(field.annotation, field.metadata):
            match annotation:
                case Rules(rules=rules):
                    yield from ((below, rule) for rule in rules)
                case type() if issubclass(annotation, BaseModel):
                    yield from python_rules(annotation, below)


def _annotations(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """The field's types and annotations, through unions, tuples and `Annotated`."""
    yield from metadata
    yield from getattr(annotation, "__metadata__", ())
    if isinstance(annotation, type):
        yield annotation
    for inside in getattr(annotation, "__args__", ()):
        yield from _annotations(inside, [])


def cel_rules() -> Iterator[tuple[str, dict[str, str]]]:
    """Every rule of the CRD, with the path of the value it is about."""
    for path, node in [((), spec_schema()), *nodes(spec_schema())]:
        for part in (node, node.get("items", {})):
            for item in part.get("x-kubernetes-validations", ()):
                yield text_path(path).replace("[0]", ""), item


def test_every_rule_is_in_python_and_in_cel() -> None:
    in_python = {(path, rule.cel, rule.message, rule.field) for path, rule in python_rules()}
    in_crd = {
        (path, item["rule"], item["message"], item.get("fieldPath", "").removeprefix(".") or None)
        for path, item in cel_rules()
    }
    assert in_python == in_crd
    assert len(in_crd) > 20


def test_every_rule_has_a_spec_that_breaks_it() -> None:
    broken = {bad.message for bad in BAD_SERVICES}
    untested = [
        rule.message for _, rule in python_rules() if not any(rule.message.startswith(b) for b in broken)
    ]
    assert untested == []


@pytest.mark.parametrize("bad", BAD_SERVICES, ids=str)
def test_a_spec_that_breaks_one_rule_is_named_by_its_field_and_by_nothing_else(bad: BadService) -> None:
    with pytest.raises(InvalidService) as error:
        parse_service(document(bad.spec))
    (problem,) = error.value.problems
    assert problem.path == bad.path
    assert problem.message.startswith(bad.message)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"uri": "hf://org/name@v1.0/beta"}},
        {"model": {"uri": "hf://org/name", "revision": "main", "cache": {"claim": {"name": "models"}}}},
        {"model": {"uri": "pvc://models/llama/8b"}},
        {"model": {"uri": "file:///models/llama-8b"}},
        {"sloClasses": [{"name": "only", "ttftMilliseconds": 1}]},
        {"sloClasses": [{"name": "only", "ttftMilliseconds": 3_600_000, "objective": "99.999"}]},
        {
            "sloClasses": [
                {"name": "a", "ttftMilliseconds": 5, "minTtftMilliseconds": 5, "maxTtftMilliseconds": 5}
            ]
        },
        {"scheduling": {"preemption": "chunk", "chunkTokens": 512}},
        {"scheduling": {"preemption": "operator", "chunkTokens": 512}},
        {"prefill": {"autoscaling": {"minReplicas": 3, "maxReplicas": 3}}},
        {"prefill": {"tensorParallelSize": 2, "resources": {"limits": {"nvidia.com/gpu": "4"}}}},
        {"kvTransfer": {"leaseSeconds": 30, "timeoutSeconds": 30}},
        {"mode": "Colocated", "decode": {"maxBatchSize": 8}},
        {"rollout": {"timeoutSeconds": 7200}, "prefill": {"startupTimeoutSeconds": 7200}},
        {"model": {"maxModelLen": 8192}, "engine": {"kvCacheTokens": 8192}},
        {"prefill": {"nodes": 2}, "decode": {"nodes": 64}},
        {"scheduling": {"predictor": {"profilingJob": True, "warmup": False}}},
        {
            "proxy": {
                "httpRoute": {
                    "parentRefs": [
                        {"name": "a", "sectionName": "https"},
                        {"name": "a", "sectionName": "http"},
                        {"name": "a", "namespace": "b"},
                    ]
                }
            }
        },
    ],
    ids=str,
)
def test_a_spec_at_the_edge_of_a_rule_is_accepted(changes: dict[str, Any]) -> None:
    parse_service(document(merged(MINIMAL_SPEC, changes)))


def test_names_in_a_keyed_list_are_unique() -> None:
    twice = [
        {"name": "chat", "ttftMilliseconds": 1, "default": True},
        {"name": "chat", "ttftMilliseconds": 2},
    ]
    with pytest.raises(InvalidService, match=r'spec\.sloClasses: name "chat" appears twice'):
        parse_service(document(merged(MINIMAL_SPEC, {"sloClasses": twice})))


def test_every_unique_list_is_a_map_or_a_set_in_the_crd() -> None:
    kinds = {
        text_path(path): node["x-kubernetes-list-type"]
        for path, node in nodes(spec_schema())
        if "items" in node
    }
    assert kinds == {
        "model.cache.persistentVolumeClaim.accessModes": "set",
        "engine.args": "atomic",
        "sloClasses": "map",
        "sloClasses[0].serviceTiers": "set",
        "prefill.resources.claims": "map",
        "decode.resources.claims": "map",
        "proxy.resources.claims": "map",
        "proxy.httpRoute.parentRefs": "atomic",
        "proxy.httpRoute.hostnames": "set",
        "imagePullSecrets": "map",
    }


def test_a_rule_without_both_halves_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        Rule(message="no CEL", holds=lambda _: True)  # type: ignore[call-arg]
