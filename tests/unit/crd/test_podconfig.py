"""The two documents for pods, and the hash that tells which changes need new pods."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill_crd import (
    InvalidConfig,
    LiveConfig,
    PodConfig,
    live_config,
    parse_service,
    pod_config,
    restart_hash,
)
from flowprefill_crd.revision import LIVE
from flowprefill_crd.schema import service_schema
from support.services import (
    MINIMAL_SPEC,
    Spec,
    changes,
    document,
    is_leaf,
    merged,
    nodes,
    spec_schema,
    text_path,
)

RESTARTS, LIVES, EACH = "Restarts pods.", "Applied live.", "Each field says whether it restarts pods."


def effect(node: dict[str, Any]) -> str:
    """What the field's documentation says that a change of it does."""
    endings = [ending for ending in (RESTARTS, LIVES, EACH) if node.get("description", "").endswith(ending)]
    assert len(endings) == 1, node.get("description")
    return endings[0]


CHANGES = [pytest.param(node, before, after, id=name) for name, node, before, after in changes()]


@pytest.mark.parametrize(("node", "before", "after"), CHANGES)
def test_a_change_starts_a_revision_exactly_when_the_field_says_so(
    node: dict[str, Any], before: Spec, after: Spec
) -> None:
    old, new = parse_service(document(before)), parse_service(document(after))
    assert old.spec != new.spec
    restarts = effect(node) == RESTARTS
    assert (restart_hash(old) != restart_hash(new)) == restarts
    if restarts:
        assert live_config(old) == live_config(new), "a restart-relevant field reaches running pods"
    else:
        assert pod_config(old, "r") == pod_config(new, "r"), "a live field changes the immutable document"


def test_a_field_of_parts_says_what_its_parts_say() -> None:
    wrong = []
    for path, node in nodes(spec_schema()):
        if is_leaf(node):
            continue
        below = {
            effect(n) for p, n in nodes(spec_schema()) if p[: len(path)] == path and p != path and is_leaf(n)
        }
        if effect(node) != (below.pop() if len(below) == 1 else EACH):
            wrong.append(text_path(path))
    assert wrong == []


def test_every_live_path_is_a_field() -> None:
    fields = {text_path(path) for path, _ in nodes(spec_schema())}
    assert set(LIVE) <= fields


def test_filled_in_defaults_do_not_start_a_revision() -> None:
    """The API server stores the defaults; the local command line sees the file as it is written."""
    service = parse_service(document(merged(MINIMAL_SPEC, {"decode": {"maxBatchSize": 8}})))
    filled = service.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert len(json.dumps(filled)) > 2 * len(json.dumps(MINIMAL_SPEC))
    assert restart_hash(parse_service(filled)) == restart_hash(service)
    emptied = merged(
        MINIMAL_SPEC, {"decode": {"maxBatchSize": 8, "resources": {}, "podTemplate": {"metadata": {}}}}
    )
    assert restart_hash(parse_service(document(emptied))) == restart_hash(service)


def test_the_hash_of_a_spec_stays_the_same_over_versions() -> None:
    """A new release must not restart pods. A new field with a default keeps these; if one changes, pods restart."""
    assert restart_hash(parse_service(document())) == "552c2f0620"
    large = {
        "model": {"uri": "hf://org/name@v1", "cache": {"claim": {"name": "models"}}, "maxModelLen": 8192},
        "engine": {"type": "vllm", "args": ["--a", "--b"]},
        "prefill": {
            "resources": {"limits": {"nvidia.com/gpu": 2}},
            "podTemplate": {"spec": {"hostIPC": True}},
        },
    }
    assert restart_hash(parse_service(document(merged(MINIMAL_SPEC, large)))) == "02603f2adf"


def test_the_hash_fits_into_a_name_and_a_label() -> None:
    text = restart_hash(parse_service(document()))
    assert len(text) == 10
    assert set(text) <= set("0123456789abcdef")


def test_the_name_and_the_status_of_a_service_do_not_count() -> None:
    one = parse_service(document(name="one", generation=1))
    two = parse_service({**document(name="two", generation=9), "status": {"url": "http://two"}})
    assert restart_hash(one) == restart_hash(two)


def test_pod_config_states_what_a_pod_needs_at_its_start() -> None:
    spec = merged(
        MINIMAL_SPEC,
        {
            "model": {"uri": "hf://org/name@v1", "maxModelLen": 4096},
            "mode": "Colocated",
            "engine": {"args": ["--x"], "kvCacheTokens": 8192, "threads": 2},
            "scheduling": {"predictor": {"profileConfigMap": "profile", "warmup": False}},
            "decode": {"maxBatchSize": 7},
            "proxy": {"queueLimit": 5, "maxBodyBytes": 2048, "requestTimeoutSeconds": 9},
            "security": {"apiKeysSecretRef": {"name": "keys"}},
            "observability": {"logFormat": "text"},
        },
    )
    config = pod_config(parse_service(document(spec, namespace="team")), "0123456789")
    assert json.loads(config.to_json()) == {
        "service": "example",
        "namespace": "team",
        "revision": "0123456789",
        "mode": "Colocated",
        "model": {"uri": "hf://org/name@v1", "revision": "v1", "servedName": "org/name", "maxModelLen": 4096},
        "engine": {
            "type": "torch",
            "args": ["--x"],
            "dtype": "auto",
            "kvCacheTokens": 8192,
            "blockSize": 16,
            "threads": 2,
            "maxGapMilliseconds": 20,
        },
        "predictor": {"warmup": False, "profileFile": "/etc/flowprefill/profile/profile.json"},
        "prefill": {"tensorParallelSize": 1},
        "decode": {"tensorParallelSize": 1, "maxBatchSize": 7},
        "proxy": {"queueLimit": 5, "maxBodyBytes": 2048, "requestTimeoutSeconds": 9},
        "kvTransfer": {"leaseSeconds": 60, "timeoutSeconds": 30, "maxRetries": 1},
        "termination": {"preStopSeconds": 5, "lameDuckSeconds": 5, "drainSeconds": 60},
        "apiKeysFile": "/etc/flowprefill/api-keys/keys",
        "logFormat": "text",
    }


def test_live_config_states_classes_with_every_default_filled_in() -> None:
    spec = merged(MINIMAL_SPEC, {"scheduling": {"preemption": "chunk", "chunkTokens": 256}})
    config = live_config(parse_service(document(spec, generation=3)))
    shared = {"objective": "90", "weight": 1, "shedWhenInfeasible": False, "serviceTiers": []}
    assert json.loads(config.to_json()) == {
        "generation": 3,
        "sloClasses": [
            {
                "name": "chat",
                "ttftMilliseconds": 1000,
                "minTtftMilliseconds": 500,
                "maxTtftMilliseconds": 4000,
                "default": True,
                **shared,
            },
            {
                "name": "document",
                "ttftMilliseconds": 8000,
                "minTtftMilliseconds": 4000,
                "maxTtftMilliseconds": 32000,
                "default": False,
                **shared,
            },
        ],
        "policy": "s-edf",
        "batchTokenBudget": 2048,
        "preemption": "chunk",
        "chunkTokens": 256,
        "maxSuspended": 8,
        "recomputeSuspendedUnderPressure": True,
        "queueLimit": 4096,
        "ageing": {"enabled": True, "factor": 4, "sharePercent": 5},
        "onlineCorrection": True,
        "logLevel": "info",
        "perRequestLog": False,
    }


def test_a_single_class_is_the_default() -> None:
    spec = {"model": {"uri": "embedded://x"}, "sloClasses": [{"name": "only", "ttftMilliseconds": 250}]}
    config = live_config(parse_service(document(spec)))
    assert config.default_slo_class.name == "only"
    assert config.slo_classes[0].default
    assert config.slo_classes[0].ttft_slo_s == 0.25


@pytest.mark.parametrize("spec", [pytest.param(after, id=name) for name, _, _, after in changes()])
def test_both_documents_survive_the_way_through_a_file(spec: Spec) -> None:
    service = parse_service(document(spec))
    pod, live = pod_config(service, restart_hash(service)), live_config(service)
    assert PodConfig.from_json(pod.to_json()) == pod
    assert LiveConfig.from_json(live.to_json()) == live


def test_a_document_of_a_newer_operator_is_read_and_an_older_one_gets_defaults() -> None:
    live = json.loads(live_config(parse_service(document())).to_json())
    assert LiveConfig.from_json(json.dumps({**live, "future": {"a": 1}})) == LiveConfig.from_json(
        json.dumps(live)
    )
    old = {key: live[key] for key in ("generation", "sloClasses")}
    assert LiveConfig.from_json(json.dumps(old)) == LiveConfig.from_json(json.dumps(live))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "lifo"}, 'live configuration: policy: "lifo" is not accepted; Input should be '),
        ({"batchTokenBudget": 0}, "live configuration: batchTokenBudget: 0 is not accepted; "),
        ({"generation": None}, "live configuration: generation: null is not accepted; "),
        ({"sloClasses": []}, "live configuration: sloClasses: [] is not accepted; "),
        ({"preemption": "chunk"}, "live configuration: preemption chunk needs chunkTokens"),
        ({"sloClasses": [{"name": "a"}]}, "live configuration: sloClasses[0].ttftMilliseconds: is missing"),
    ],
)
def test_a_document_that_cannot_be_used_is_told_what_is_wrong(change: dict[str, Any], message: str) -> None:
    live = json.loads(live_config(parse_service(document())).to_json())
    with pytest.raises(InvalidConfig) as error:
        LiveConfig.from_json(json.dumps({**live, **change}))
    assert str(error.value.problems[0]).startswith(message)


def test_classes_of_a_live_document_are_checked_together() -> None:
    live = json.loads(live_config(parse_service(document())).to_json())
    first, second = live["sloClasses"]
    for classes, message in (
        ([first, {**second, "default": True}], "exactly one class must be the default"),
        ([first, {**second, "name": "chat"}], r"class names \['chat', 'chat'\] must be different"),
        (
            [{**first, "minTtftMilliseconds": 2000}],
            r"class chat: minimum, target and maximum \(2000, 1000, 4000\)",
        ),
    ):
        with pytest.raises(InvalidConfig, match=message):
            LiveConfig.from_json(json.dumps({**live, "sloClasses": classes}))


def test_text_that_is_no_json_is_told_so() -> None:
    for text in ("", "{", "\x00", b"\xff"):
        with pytest.raises(InvalidConfig, match="pod configuration: Invalid JSON"):
            PodConfig.from_json(text)


def test_documentation_of_every_spec_field_exists() -> None:
    undocumented = [
        text_path(path)
        for path, node in nodes(service_schema()["properties"]["spec"])
        if not node.get("description")
    ]
    assert undocumented == []
