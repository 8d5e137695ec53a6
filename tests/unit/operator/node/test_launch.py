"""From a container to a command of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill_crd import parse_service
from flowprefill_operator.node.desired import desired
from flowprefill_operator.node.launch import CannotRun, Place, PodIdentity, expand, launch
from flowprefill_operator.node.template import Container
from flowprefill_operator.plan import plan
from flowprefill_operator.settings import LocalPlaces, PlanSettings
from support.services import MINIMAL_SPEC, document

IDENTITY = PodIdentity(name="chat-prefill-0", namespace="team", labels={"flowprefill.io/role": "prefill"})
PLACE = Place(
    mounts={
        "/etc/app": Path("/state/config"),
        "/etc/app/live": Path("/state/live"),
        "/tmp": Path("/state/tmp"),
    },
    ports={8000: 40001, 9000: 40002},
)


def run(args: list[str], env: list[dict[str, object]] | None = None) -> tuple[list[str], dict[str, str]]:
    body = {"name": "c", "command": ["serve"], "args": args, "env": env or []}
    found = launch(Container.model_validate(body), IDENTITY, PLACE, {"HOME": "/home/u"})
    return list(found.argv[1:]), dict(found.env)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--port", "8000", "--admin-port=9000"], ["--port", "40001", "--admin-port=40002"]),
        (["--max", "8000", "--port", "8001"], ["--max", "8000", "--port", "8001"]),
        (["--config", "/etc/app/config.json"], ["--config", "/state/config/config.json"]),
        (["--live", "/etc/app/live", "--x=/etc/app/live/y"], ["--live", "/state/live", "--x=/state/live/y"]),
        (["/etc/application"], ["/etc/application"]),
        (["--host", "0.0.0.0"], ["--host", "127.0.0.1"]),
        (["--host=::", "0.0.0.0"], ["--host=127.0.0.1", "0.0.0.0"]),
        (["$(POD)", "$$(POD)", "$(NONE)"], ["chat-prefill-0", "$(POD)", "$(NONE)"]),
    ],
    ids=[
        "ports",
        "other numbers",
        "path",
        "deepest mount wins",
        "part of a name",
        "host",
        "host=",
        "expansion",
    ],
)
def test_arguments_mean_the_same_here(args: list[str], expected: list[str]) -> None:
    env: list[dict[str, object]] = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    ]
    assert run(args, env)[0] == expected


def test_a_variable_knows_the_pod_and_earlier_variables_and_wins_over_the_machine() -> None:
    _, env = run(
        [],
        [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "ROLE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['flowprefill.io/role']"}},
            },
            {"name": "URL", "value": "http://$(IP)/$(ROLE)"},
            {"name": "HOME", "value": "/tmp/home"},
        ],
    )
    assert env["URL"] == "http://127.0.0.1/prefill"
    assert env["HOME"] == "/state/tmp/home"


def test_expansion_follows_kubernetes() -> None:
    """Cases from k8s.io/kubernetes third_party/forked/golang/expansion."""
    env = {"VAR_A": "A", "VAR_B": "B"}
    for text, expected in {
        "$(VAR_A)": "A",
        "___$(VAR_B)___": "___B___",
        "$$(VAR_A)": "$(VAR_A)",
        "$$$(VAR_A)": "$A",
        "$(VAR_A": "$(VAR_A",
        "$VAR_A": "$VAR_A",
        "foo$": "foo$",
        "$(MISSING)": "$(MISSING)",
    }.items():
        assert expand(text, env) == expected


def test_a_key_of_a_secret_comes_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    env = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    container = Container.model_validate({"name": "c", "command": ["x"], "env": env})
    place = Place(mounts={}, ports={}, files={("Secret", "hub"): tmp_path})
    assert launch(container, IDENTITY, place, {}).env["T"] == "s3cret"
    with pytest.raises(CannotRun, match="key 'token' of Secret 'hub'"):
        launch(container, IDENTITY, PLACE, {})


def test_a_container_that_only_an_image_can_start_is_refused_with_the_reason() -> None:
    with pytest.raises(CannotRun, match="'side' has no command"):
        launch(Container(name="side"), IDENTITY, PLACE, {})


def test_a_model_is_fetched_here_at_what_its_branch_is_and_kept_in_the_pods_own_folder(
    tmp_path: Path,
) -> None:
    service = parse_service(document({**MINIMAL_SPEC, "model": {"uri": "hf://org/name"}}))
    places = LocalPlaces(endpoints=tmp_path, claims=tmp_path, cache=tmp_path / "cache")
    (prefill, *_) = desired(plan(service, PlanSettings(local=places))).groups
    place = Place(mounts={"/tmp": tmp_path / "pod", "/var/cache/flowprefill": places.cache}, ports={})
    (init,), (main,) = prefill.template.spec.init_containers, prefill.template.spec.containers
    found = launch(init, IDENTITY, place, {})
    assert found.argv == ("flowprefill", "model", "pull", "hf://org/name", "--revision", "main")
    assert "FLOWPREFILL_MODEL_COMMIT" not in found.env
    kept = found.env["FLOWPREFILL_MODEL_PIN"]
    assert Path(kept).parent == tmp_path / "pod"
    assert launch(main, IDENTITY, place, {}).env["FLOWPREFILL_MODEL_PIN"] == kept
