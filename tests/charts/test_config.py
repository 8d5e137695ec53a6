"""The configuration that the chart renders is the operator's own, and says what the values say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowprefill_operator.config import OperatorConfig, load_config
from flowprefill_operator.settings import PlanSettings
from support.helm import Helm, default_values, only, values_schema
from support.helm_values import CASES, IMAGES, TOGETHER, toggles

DIGEST = f"sha256:{'a' * 64}"


def text_of(helm: Helm, values: dict[str, Any] | None = None, **render: Any) -> str:
    objects = helm.template(values, **render)
    operator = only(objects, "Deployment")["metadata"]["name"]
    return str(only(objects, "ConfigMap", operator)["data"]["config.yaml"])


def config_of(
    helm: Helm, tmp_path: Path, values: dict[str, Any] | None = None, **render: Any
) -> OperatorConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text_of(helm, values, **render))
    return load_config(path)


def test_default_values_are_the_operators_defaults(helm: Helm, tmp_path: Path) -> None:
    """So that an operator that somebody runs by hand behaves like an installed one. Only who may read metrics differs:
    the chart names the usual namespace of Prometheus."""
    rendered = config_of(helm, tmp_path).model_dump()
    own = OperatorConfig().model_dump()
    images = rendered.pop("images")
    assert own.pop("images") == dict.fromkeys(images)
    assert rendered.pop("monitoring_from") == (
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    )
    own.pop("monitoring_from")
    assert rendered == own
    planned = PlanSettings()
    proxy = images.pop("proxy")
    assert images == dict(planned.images)
    assert proxy == planned.proxy_image


ALL = CASES | toggles(values_schema(), default_values())


@pytest.mark.parametrize("name", ALL)
def test_the_configuration_of_every_case_is_accepted(helm: Helm, tmp_path: Path, name: str) -> None:
    config_of(helm, tmp_path, dict(ALL[name].values), apis=ALL[name].apis)


def test_every_toggle_changes_what_is_rendered(helm: Helm) -> None:
    """A value that nothing reads would pass all other tests."""
    for name, case in toggles(values_schema(), default_values()).items():
        without = helm.template(TOGETHER.get(name), apis=case.apis)
        assert helm.template(case.values, apis=case.apis) != without, name


def test_the_operator_is_told_what_the_values_say(helm: Helm, tmp_path: Path) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    config = config_of(
        helm,
        tmp_path,
        {
            "namespaces": ["team-a"],
            "imagePullSecrets": [{"name": "regcred"}],
            "image": {"pullPolicy": "Always"},
            "serving": {"networkPolicy": False},
            "monitoring": {"from": peers},
            "leaderElection": {"leaseSeconds": 30},
            "resyncSeconds": 7,
            "logLevel": "warning",
            "logFormat": "text",
        },
        name="fp",
    )
    assert config.namespaces == ("team-a",)
    assert config.image_pull_secrets == ("regcred",)
    assert config.image_pull_policy == "Always"
    assert config.network_policy is False
    assert list(config.monitoring_from) == peers
    assert config.leader_election.enabled is True
    assert config.leader_election.lease_name == "fp-flowprefill-operator"
    assert config.leader_election.lease_namespace is None
    assert config.leader_election.lease_seconds == 30
    assert (config.resync_seconds, config.log_level, config.log_format) == (7, "warning", "text")


def test_serving_images_follow_registry_and_tag_of_the_operators_unless_they_have_their_own(
    helm: Helm, tmp_path: Path
) -> None:
    images = config_of(helm, tmp_path, IMAGES).images
    registry = "registry.example.com:5000/team"
    assert images.torch == f"{registry}/flowprefill/serving:own"
    assert images.simulated == f"{registry}/flowprefill/serving:1.2.3"
    assert images.proxy == f"{registry}/flowprefill/proxy:1.2.3"
    assert images.vllm == f"other.example.com/flowprefill/serving-vllm@{DIGEST}"


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ({}, "flowprefill/operator:0.1.0"),
        ({"registry": "registry.example.com/"}, None),
        ({"registry": "registry.example.com"}, "registry.example.com/flowprefill/operator:0.1.0"),
        ({"registry": "localhost", "repository": "mine"}, "localhost/mine:0.1.0"),
        ({"tag": "dev"}, "flowprefill/operator:dev"),
        ({"tag": "dev", "digest": DIGEST}, f"flowprefill/operator@{DIGEST}"),
    ],
)
def test_the_operators_image_is_put_together(helm: Helm, image: dict[str, str], name: str | None) -> None:
    if name is None:
        assert "registry" in helm.refusal({"image": image})
        return
    (container,) = only(helm.template({"image": image}), "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"] == name


def test_pull_secrets_go_to_the_operators_pods_too(helm: Helm) -> None:
    objects = helm.template(IMAGES)
    for spec in (only(objects, "Deployment")["spec"]["template"]["spec"], only(objects, "Pod")["spec"]):
        assert spec["imagePullSecrets"] == IMAGES["imagePullSecrets"]
        assert all(container["imagePullPolicy"] == "Always" for container in spec["containers"])
