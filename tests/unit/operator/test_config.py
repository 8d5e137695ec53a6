"""The operator's configuration: what the chart writes is read, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flowprefill_crd import InvalidConfig
from flowprefill_operator.config import OperatorConfig, load_config
from flowprefill_operator.settings import PlanSettings

EVERYTHING = """
namespaces: [team-a, team-b]
images: {torch: "r.example/serving:2", simulated: "r.example/sim:2", vllm: "r.example/vllm:2", proxy: "r.example/proxy:2"}
imagePullPolicy: Always
imagePullSecrets: [registry, other.registry]
networkPolicy: false
monitoringFrom:
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}
leaderElection: {enabled: false, leaseName: other, leaseNamespace: system, leaseSeconds: 30}
resyncSeconds: 10
logFormat: text
logLevel: debug
port: 9090
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "operator.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load_config(written(folder, text))
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


def test_without_a_file_and_with_an_empty_one_everything_has_its_default(tmp_path: Path) -> None:
    assert load_config(None) == OperatorConfig() == load_config(written(tmp_path, ""))
    assert OperatorConfig().leader_election.lease_name == "flowprefill-operator"


def test_every_field_is_read_by_its_name_in_the_file(tmp_path: Path) -> None:
    found = load_config(written(tmp_path, EVERYTHING))
    assert found.model_dump(mode="json", by_alias=True) == yaml.safe_load(EVERYTHING)


def test_what_services_are_planned_with_follows_the_file_and_the_operator_s_namespace(tmp_path: Path) -> None:
    settings = load_config(written(tmp_path, EVERYTHING)).plan_settings(namespace="system")
    assert dict(settings.images) == {
        "torch": "r.example/serving:2",
        "simulated": "r.example/sim:2",
        "vllm": "r.example/vllm:2",
    }
    assert settings.proxy_image == "r.example/proxy:2"
    assert settings.image_pull_policy == "Always"
    assert settings.image_pull_secrets == ("registry", "other.registry")
    assert settings.network_policy is False
    assert settings.operator_namespace == "system"
    assert settings.monitoring_from is not None
    assert [dict(peer) for peer in settings.monitoring_from] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_images_that_are_left_out_are_this_release_s_own(tmp_path: Path) -> None:
    settings = load_config(written(tmp_path, "images: {vllm: mine:1}")).plan_settings(namespace=None)
    own = PlanSettings()
    assert dict(settings.images) == {**own.images, "vllm": "mine:1"}
    assert settings.proxy_image == own.proxy_image


WRONG: dict[str, tuple[str, str, str]] = {
    "a peer of no kind": (
        "monitoringFrom: [{pods: {}}]",
        "monitoringFrom[0]",
        'use one or more of podSelector, namespaceSelector and ipBlock, each an object; got {"pods": {}}',
    ),
    "an unknown field": ("resyncSecond: 5", "resyncSecond", "unknown field; did you mean resyncSeconds?"),
    "a name in Python's way": (
        "resync_seconds: 5",
        "resync_seconds",
        "unknown field; did you mean resyncSeconds?",
    ),
    "a field of a part at the top": (
        "leaseName: a",
        "leaseName",
        "unknown field; did you mean leaderElection.leaseName?",
    ),
    "a number that is too small": (
        "resyncSeconds: 0",
        "resyncSeconds",
        "0 is not accepted; use an integer from 1 to 3600",
    ),
    "a port that is none": ("port: 70000", "port", "70000 is not accepted; use an integer from 0 to 65535"),
    "a text in the place of a number": (
        "port: http",
        "port",
        '"http" is not accepted; use an integer from 0 to 65535',
    ),
    "a number in the place of a text": (
        "images: {torch: 5}",
        "images.torch",
        "5 is not accepted; use a string of 1 to 512 characters: visible ASCII characters, no spaces (put it in quotes)",
    ),
    "a namespace that cannot be": (
        "namespaces: [ok, Not_Ok]",
        "namespaces[1]",
        '"Not_Ok" is not accepted; use a string of 1 to 63 characters: lower-case letters, digits and dashes',
    ),
    "a text in the place of a list": (
        "namespaces: prod",
        "namespaces",
        '"prod" is not accepted; use a list of 0 to 1000 items',
    ),
    "one namespace twice": (
        "namespaces: [a, b, a]",
        "namespaces",
        '"a" appears twice; each may appear once',
    ),
    "a choice that is none": (
        "imagePullPolicy: Sometimes",
        "imagePullPolicy",
        '"Sometimes" is not accepted; use one of IfNotPresent, Always, Never',
    ),
    "an image with a space": (
        "images: {torch: 'a b'}",
        "images.torch",
        '"a b" is not accepted; use a string of 1 to 512 characters: visible ASCII characters, no spaces',
    ),
    "an image of an unknown engine": (
        "images: {other: a}",
        "images.other",
        "unknown field; images has the fields torch, simulated, vllm, proxy",
    ),
    "a part that is no mapping": (
        "leaderElection: true",
        "leaderElection",
        "true is not accepted; use an object with the fields enabled, leaseName, leaseNamespace, leaseSeconds",
    ),
    "a peer that is no mapping": (
        "monitoringFrom: [a]",
        "monitoringFrom[0]",
        '"a" is not accepted; use an object',
    ),
    "a lease that is over at once": (
        "leaderElection: {leaseSeconds: 1}",
        "leaderElection.leaseSeconds",
        "1 is not accepted; use an integer from 3 to 300",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_the_file_the_field_and_the_value(case: str, tmp_path: Path) -> None:
    text, path, said = WRONG[case]
    with pytest.raises(InvalidConfig) as caught:
        load_config(written(tmp_path, text))
    (problem,) = caught.value.problems
    assert problem.source == str(tmp_path / "operator.yaml")
    assert problem.path == path
    assert problem.message == said
    assert str(tmp_path / "operator.yaml") in str(caught.value)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "port: -1\nresyncSeconds: 0\nmore: 1")) == 3


@pytest.mark.parametrize("text", ["- a", "just text", "3"])
def test_a_file_that_is_no_mapping_is_told_what_is_accepted(tmp_path: Path, text: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert "use a mapping" in problem


def test_a_file_that_is_no_yaml_is_told_where(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "namespaces: [a\nport: 1")
    assert "is not YAML" in problem
    assert "line 2" in problem


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        OperatorConfig().port = 1  # type: ignore[misc]
