"""YAML becomes a service, or a message that names every problem by its field."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowprefill_crd import FlowPrefillService, InvalidService, SloClass, load_services, parse_service
from support.services import MINIMAL_SPEC, changes, document, merged

MINIMAL = """\
apiVersion: flowprefill.io/v1alpha1
kind: FlowPrefillService
metadata:
  name: NAME
spec:
  model:
    uri: embedded://tiny
  sloClasses:
  - name: chat
    ttftMilliseconds: 1000
"""


def problems(change: dict[str, Any]) -> list[str]:
    """The problems of the smallest spec with the changes, as text."""
    with pytest.raises(InvalidService) as error:
        parse_service(document(merged(MINIMAL_SPEC, change)))
    return [str(problem) for problem in error.value.problems]


def text_problems(text: str) -> list[str]:
    """The problems of a YAML text."""
    with pytest.raises(InvalidService) as error:
        parse_service(text)
    return [str(problem) for problem in error.value.problems]


def test_the_smallest_service_has_defaults_that_work() -> None:
    spec = parse_service(MINIMAL.replace("NAME", "tiny")).spec
    assert (spec.mode, spec.engine.type, spec.engine.block_size, spec.engine.threads) == (
        "Disaggregated",
        "torch",
        16,
        1,
    )
    assert (spec.scheduling.policy, spec.scheduling.preemption) == ("s-edf", "operator")
    assert (spec.scheduling.batch_token_budget, spec.scheduling.max_suspended) == (2048, 8)
    assert [role.initial_replicas for role in (spec.prefill, spec.decode, spec.proxy)] == [1, 1, 1]
    assert (spec.decode.max_batch_size, spec.kv_transfer.lease_seconds) == (32, 60)
    assert spec.model.resolved_served_name == "tiny"
    assert spec.default_slo_class.name == "chat"


def test_bounds_of_a_target_default_to_half_and_four_times_of_it() -> None:
    chat = SloClass(name="chat", ttft_milliseconds=1000)
    assert (chat.resolved_min_ttft_milliseconds, chat.resolved_max_ttft_milliseconds) == (500, 4000)
    least, most = SloClass(name="a", ttft_milliseconds=1), SloClass(name="b", ttft_milliseconds=3_000_000)
    assert least.resolved_min_ttft_milliseconds == 1
    assert most.resolved_max_ttft_milliseconds == 3_600_000
    own = SloClass(name="c", ttft_milliseconds=1000, min_ttft_milliseconds=900, max_ttft_milliseconds=1100)
    assert (own.resolved_min_ttft_milliseconds, own.resolved_max_ttft_milliseconds) == (900, 1100)


def test_an_objective_is_a_ratio_for_programs() -> None:
    assert SloClass(name="chat", ttft_milliseconds=1, objective="99.9").objective_ratio == 0.999


@pytest.mark.parametrize(
    ("uri", "name", "revision"),
    [
        ("embedded://smollm2-135m-instruct", "smollm2-135m-instruct", None),
        ("hf://org/name", "org/name", "main"),
        ("hf://org/name@v1", "org/name", "v1"),
        ("file:///models/llama-8b/", "llama-8b", None),
        ("pvc://claim/llama/8b", "8b", None),
    ],
)
def test_the_served_name_and_the_revision_follow_from_the_uri(
    uri: str, name: str, revision: str | None
) -> None:
    model = parse_service(document(merged(MINIMAL_SPEC, {"model": {"uri": uri}}))).spec.model
    assert (model.resolved_served_name, model.resolved_revision) == (name, revision)


def test_a_downloaded_model_without_a_cache_is_kept_in_a_sized_volume_of_the_pod() -> None:
    model = parse_service(document(merged(MINIMAL_SPEC, {"model": {"uri": "hf://a/b"}}))).spec.model
    assert model.resolved_cache is not None
    assert model.resolved_cache.empty_dir is not None
    assert model.resolved_cache.empty_dir.size_limit == "100Gi"
    assert parse_service(document()).spec.model.resolved_cache is None


def test_every_problem_is_listed_with_its_path_the_value_and_what_is_accepted() -> None:
    assert problems(
        {
            "sloClasses": [
                {"name": "chat", "ttftMilliseconds": 1000, "default": True},
                {"name": "document", "ttftMilliseconds": 0},
            ],
            "scheduling": {"policy": "lifo", "maxSuspended": "8"},
            "paused": "no",
            "prefill": {"resources": {"limits": {"nvidia.com/gpu": "one"}}},
        }
    ) == [
        "spec.sloClasses[1].ttftMilliseconds: 0 is not accepted; use an integer from 1 to 3600000",
        'spec.scheduling.policy: "lifo" is not accepted; use one of fcfs, edf, d-edf, s-edf, srpt, moore-hodgson',
        'spec.scheduling.maxSuspended: "8" is not accepted; use an integer from 0 to 64',
        'spec.prefill.resources.limits[nvidia.com/gpu]: "one" is not accepted; use an amount such as 2, "500m" or "16Gi"',
        'spec.paused: "no" is not accepted; use true or false',
    ]


def test_the_message_of_the_error_is_its_problems_a_line_each() -> None:
    with pytest.raises(InvalidService) as error:
        parse_service(document(merged(MINIMAL_SPEC, {"mode": "both", "paused": 1})))
    assert str(error.value) == (
        "invalid FlowPrefillService:\n"
        '  spec.mode: "both" is not accepted; use one of Disaggregated, Colocated\n'
        "  spec.paused: 1 is not accepted; use true or false"
    )


def test_an_objective_without_quotes_is_told_to_be_quoted() -> None:
    (problem,) = problems({"sloClasses": [{"name": "chat", "ttftMilliseconds": 1, "objective": 99.9}]})
    assert problem == (
        'spec.sloClasses[0].objective: 99.9 is not accepted; use a percent from "50" to "99.999" with at most three '
        "decimals, as a string (put it in quotes)"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {}}, "spec.modle: unknown field; did you mean mode or model?"),
        ({"kv_transfer": {"leaseSeconds": 61}}, "spec.kv_transfer: unknown field; did you mean kvTransfer?"),
        (
            {"batchTokenBudget": 1},
            "spec.batchTokenBudget: unknown field; did you mean spec.scheduling.batchTokenBudget?",
        ),
        (
            {"decode": {"podTemplate": {"containers": []}}},
            "spec.decode.podTemplate.containers: unknown field; spec.decode.podTemplate has the fields metadata, spec",
        ),
        (
            {"sloClasses": [{"name": "chat", "ttftMilliseconds": 1, "ttft": 1}]},
            (
                "spec.sloClasses[0].ttft: unknown field; spec.sloClasses[0] has the fields name, ttftMilliseconds, "
                "tbtMilliseconds, objective, minTtftMilliseconds, maxTtftMilliseconds, weight, default, "
                "shedWhenInfeasible, serviceTiers"
            ),
        ),
    ],
)
def test_an_unknown_field_is_named_with_the_closest_known_one(change: dict[str, Any], message: str) -> None:
    assert problems(change) == [message]


def test_missing_fields_are_named() -> None:
    assert text_problems(
        "apiVersion: flowprefill.io/v1alpha1\nkind: FlowPrefillService\nmetadata: {}\nspec: {}\n"
    ) == [
        "metadata.name: is missing; use a string of 1 to 253 characters: lower-case letters, digits, dashes and dots",
        "spec.model: is missing; use an object with the fields uri, revision, servedName, secretRef, cache, maxModelLen",
        "spec.sloClasses: is missing; use a list of 1 to 16 items",
    ]


@pytest.mark.parametrize("name", ["a", "0", "a.b-c.d", "x" * 253, "llama-3.1-8b"])
def test_every_name_that_kubernetes_accepts_is_accepted(name: str) -> None:
    assert parse_service(document(name=name)).metadata.name == name


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a..b", "x" * 254])
def test_a_name_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(InvalidService, match=r"metadata\.name"):
        parse_service(document(name=name))


def test_null_is_absence_as_in_the_api_server() -> None:
    spec = merged(MINIMAL_SPEC, {"prefill": None, "engine": {"image": None}, "scheduling": {"policy": None}})
    assert parse_service(document(spec)).spec == parse_service(document()).spec


def test_a_pod_template_keeps_every_field_even_null() -> None:
    template = {"spec": {"anything": {"at": [1, {"all": None}]}, "nodeSelector": None}}
    role = parse_service(document(merged(MINIMAL_SPEC, {"decode": {"podTemplate": template}}))).spec.decode
    assert role.pod_template.spec == template["spec"]


def test_metadata_and_status_of_a_newer_cluster_are_read_as_far_as_they_are_known() -> None:
    body = document(namespace="team", uid="u", generation=7, managedFields=[{"manager": "kubectl"}], future=1)
    body["status"] = {
        "observedGeneration": 7,
        "future": {},
        "roles": {"prefill": {"replicas": 2, "future": 1}},
    }
    service = parse_service(body)
    assert (service.metadata.namespace, service.metadata.uid, service.metadata.generation) == ("team", "u", 7)
    assert service.status is not None
    assert service.status.roles is not None
    assert service.status.roles.prefill is not None
    assert service.status.roles.prefill.replicas == 2


def test_a_status_that_cannot_be_read_does_not_stand_in_the_way_of_the_spec() -> None:
    assert parse_service({**document(), "status": {"observedGeneration": "seven"}}).status is None


@pytest.mark.parametrize(("spec"), [pytest.param(after, id=name) for name, _, _, after in changes()])
def test_a_service_survives_the_way_to_json_and_back(spec: dict[str, Any]) -> None:
    service = parse_service(document(spec))
    whole = service.model_dump(mode="json", by_alias=True, exclude_none=True)
    short = service.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    assert parse_service(whole) == service
    assert parse_service({**whole, "spec": short["spec"]}) == service
    assert parse_service(yaml.safe_dump(whole)) == service


def test_services_are_values() -> None:
    first, second = parse_service(document()), parse_service(document())
    assert first == second
    with pytest.raises(ValueError, match="frozen"):
        first.spec.paused = True  # type: ignore[misc]


def test_a_repeated_key_is_an_error_that_names_both_lines() -> None:
    text = MINIMAL.replace("NAME", "a") + "  paused: false\n  mode: Colocated\n  paused: true\n"
    assert text_problems(text) == [
        'line 13, column 3: the key "paused" appears twice, first in line 11; keep one'
    ]


def test_a_merged_anchor_is_not_a_repeated_key() -> None:
    text = MINIMAL.replace("NAME", "a") + textwrap.indent(
        "prefill: &role\n  replicas: 2\ndecode:\n  <<: *role\n  maxBatchSize: 4\n", "  "
    )
    decode = parse_service(text).spec.decode
    assert (decode.replicas, decode.max_batch_size) == (2, 4)


def test_dates_stay_text_as_in_the_api_server() -> None:
    text = MINIMAL.replace("NAME", "a") + "  model_date: 2026-01-02\n"
    assert text_problems(text)[0].startswith("spec.model_date: unknown field")
    assert (
        parse_service(MINIMAL.replace("NAME", "a").replace("chat", "2026-01-02")).spec.slo_classes[0].name
        == "2026-01-02"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "holds no FlowPrefillService; write a document with apiVersion: flowprefill.io/v1alpha1 and kind: FlowPrefillService",
        ),
        ("---\n---\n# nothing\n", "holds no FlowPrefillService"),
        ("[1, 2]", "[1, 2] is not accepted; use a mapping with apiVersion, kind, metadata and spec"),
        ("hello", '"hello" is not accepted; use a mapping'),
        ("a: [1", "line 1, column 6: "),
        ("a: !!python/object:os.system {}", "line 1, column 4: could not determine a constructor"),
        ("a: !!int x", "is not YAML: "),
        ("a: !!bool x", "is not YAML: "),
        ("a: !!timestamp x", "is not YAML: "),
        ("[" * 2000 + "]" * 2000, "is not YAML: "),
        ("kind: FlowPrefillService", "apiVersion: is missing; use flowprefill.io/v1alpha1"),
        (
            "apiVersion: flowprefill.io/v1\nkind: FlowPrefillService",
            'apiVersion: "flowprefill.io/v1" is not accepted; use flowprefill.io/v1alpha1',
        ),
        (
            "apiVersion: flowprefill.io/v1alpha1\nkind: FlowPrefilService",
            'kind: "FlowPrefilService" is not accepted; use FlowPrefillService',
        ),
        ("apiVersion: v1\nkind: Service\nmetadata: {name: a}", 'apiVersion: "v1" is not accepted'),
    ],
)
def test_text_that_is_no_service_is_told_what_is_wrong(text: str, message: str) -> None:
    assert text_problems(text)[0].startswith(message)


def test_a_value_that_json_cannot_express_is_refused() -> None:
    text = MINIMAL.replace("NAME", "a") + "  prefill: {podTemplate: {spec: {x: .nan}}}\n"
    assert text_problems(text)[0].startswith("holds a value that JSON cannot express")
    text = MINIMAL.replace("NAME", "a") + "  prefill: {podTemplate: {spec: &x {y: *x}}}\n"
    assert text_problems(text)[0].startswith("holds a value that JSON cannot express")


def test_a_file_may_hold_several_services(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text("---\n".join(MINIMAL.replace("NAME", name) for name in ("one", "two")))
    services = load_services(path)
    assert [service.metadata.name for service in services] == ["one", "two"]
    assert all(isinstance(service, FlowPrefillService) for service in services)


def test_problems_of_a_file_name_the_file_and_the_document(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    bad = MINIMAL.replace("NAME", "two").replace("1000", "0")
    path.write_text(f"{MINIMAL.replace('NAME', 'one')}---\n{bad}")
    with pytest.raises(InvalidService) as error:
        load_services(path)
    assert [str(p) for p in error.value.problems] == [
        f"{path}, document 2: spec.sloClasses[0].ttftMilliseconds: 0 is not accepted; use an integer from 1 to 3600000"
    ]


def test_one_name_may_be_used_once_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("---\n".join([MINIMAL.replace("NAME", "one")] * 2))
    with pytest.raises(
        InvalidService, match=r'document 2: metadata\.name: a second service "one" in namespace "default"'
    ):
        load_services(path)


def test_other_kinds_are_skipped_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(
        f"apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\n---\n{MINIMAL.replace('NAME', 'one')}"
    )
    with pytest.raises(
        InvalidService, match='document 1: kind: "Secret" is not accepted; use FlowPrefillService'
    ):
        load_services(path)
    assert [s.metadata.name for s in load_services(path, ignore_other_kinds=True)] == ["one"]


def test_a_service_of_another_version_is_never_skipped(tmp_path: Path) -> None:
    path = tmp_path / "v2.yaml"
    path.write_text("apiVersion: flowprefill.io/v2\nkind: FlowPrefillService\n")
    with pytest.raises(InvalidService, match=r'"flowprefill\.io/v2" is not accepted'):
        load_services(path, ignore_other_kinds=True)


def test_a_file_that_cannot_be_read_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(InvalidService, match=r"none\.yaml: cannot be read: No such file"):
        load_services(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidService, match=r"binary\.yaml: cannot be read: is not UTF-8 text"):
        load_services(str(tmp_path / "binary.yaml"))


def test_parsing_one_service_refuses_two() -> None:
    text = "---\n".join(MINIMAL.replace("NAME", name) for name in ("one", "two"))
    assert text_problems(text) == [
        "holds 2 services; parse one at a time, or load the file with load_services"
    ]
