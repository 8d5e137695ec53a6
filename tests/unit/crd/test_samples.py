"""The samples and the annotated service are valid and say what they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowprefill_crd import live_config, load_services, restart_hash
from flowprefill_crd.crd import root_schema
from flowprefill_crd.generate import ROOT
from support.services import nodes, text_path

SAMPLES = sorted((ROOT / "crds" / "samples").glob("*.yaml"))
ANNOTATED = ROOT / "docs" / "reference" / "annotated-service.yaml"


def sample(name: str) -> Any:
    """The service in a sample."""
    (service,) = load_services(ROOT / "crds" / "samples" / f"{name}.yaml")
    return service


def test_there_are_samples() -> None:
    assert [path.stem for path in SAMPLES] == [
        "baseline-fcfs",
        "colocated",
        "gpu-simulated",
        "quickstart",
        "two-prefill",
        "vllm-2p2d",
        "vllm-70b-tp4",
        "vllm-8b",
        "vllm-cpu",
        "vllm-gpu",
        "vllm-moe",
    ]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_sample_is_valid_and_named_like_its_file(path: Path) -> None:
    (service,) = load_services(path)
    assert service.metadata.name == path.stem
    assert path.read_text().startswith("# "), "a sample starts by saying what it shows"


def test_the_quickstart_is_what_the_demo_expects() -> None:
    service = sample("quickstart")
    assert service.spec.model.uri == "embedded://smollm2-135m-instruct"
    assert service.spec.engine.type == "torch"
    assert [r.initial_replicas for r in (service.spec.proxy, service.spec.prefill, service.spec.decode)] == [
        1,
        1,
        1,
    ]
    classes = live_config(service).slo_classes
    assert [(c.name, c.ttft_milliseconds, c.default) for c in classes] == [
        ("chat", 1000, True),
        ("document", 8000, False),
    ]


def test_the_baseline_differs_from_the_quickstart_in_its_scheduling_alone() -> None:
    baseline, quickstart = sample("baseline-fcfs"), sample("quickstart")
    assert restart_hash(baseline) == restart_hash(quickstart)
    assert (baseline.spec.scheduling.policy, baseline.spec.scheduling.preemption) == ("fcfs", "none")
    assert baseline.spec.model_copy(update={"scheduling": quickstart.spec.scheduling}) == quickstart.spec


def test_the_annotated_service_is_valid() -> None:
    (service,) = load_services(ANNOTATED)
    assert service.status is not None
    raw = yaml.safe_load(ANNOTATED.read_text())
    assert (
        service.status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
        == raw["status"]
    )


def test_the_annotated_service_names_every_field() -> None:
    with_alternatives = re.sub(r"(?m)^( *)#(?=[^ ]|  )", r"\1", ANNOTATED.read_text())
    raw = yaml.safe_load(with_alternatives)
    root = root_schema()["properties"]
    fields = {top: {text_path(path) for path, _ in nodes(root[top])} for top in ("spec", "status")}
    for top in ("spec", "status"):
        assert set(written(raw[top])) == fields[top], top


def written(value: Any, path: str = "") -> list[str]:
    """The paths in a YAML value; all items of a list share the path of the first."""
    if isinstance(value, list):
        return [p for item in value for p in written(item, f"{path}[0]")]
    if not isinstance(value, dict):
        return []
    found = []
    for key, item in value.items():
        below = f"{path}.{key}".lstrip(".")
        if re.search(r"(requests|limits|labels|annotations|podTemplate\.spec|monitorLabels)$", path):
            continue
        found += [below, *written(item, below)]
    return found
