"""What this machine can never run is refused with its fields before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flowprefill_crd import InvalidService, parse_service
from flowprefill_operator.node.check import check
from support.services import MINIMAL_SPEC, document, merged

NAMES_FILES = {
    "model": {"uri": "hf://org/model", "secretRef": {"name": "hub", "key": "token"}},
    "security": {"apiKeysSecretRef": {"name": "keys", "key": "k"}},
}


def problems(spec: dict[str, Any], files: Path | None = None, *, running: bool = False) -> dict[str, str]:
    """What is refused, by field."""
    service = parse_service(document(merged(MINIMAL_SPEC, spec)))
    try:
        check(service, files, running=running)
    except InvalidService as error:
        return {problem.path: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_what_this_machine_runs_is_taken(engine: str) -> None:
    assert problems({"engine": {"type": engine}}) == {}


def test_vllm_is_refused_without_vllm_and_taken_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = [path for path in sys.path if not (Path(path) / "vllm").is_dir()]
    monkeypatch.setattr(sys, "path", without)
    ((field, reason),) = problems({"engine": {"type": "vllm"}}).items()
    assert field == "spec.engine.type"
    assert reason.startswith(
        '"vllm" does not run in this environment, which has no vLLM; accepted here are torch'
    )
    assert "make vllm-cpu" in reason
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *without])
    assert problems({"engine": {"type": "vllm"}}) == {}


def test_each_secret_that_is_not_there_is_named_with_the_place_to_put_it() -> None:
    found = problems(NAMES_FILES)
    assert found == {
        "spec.model.secretRef": (
            'Secret "hub" is not here: put it at FOLDER/hub/token and pass --files FOLDER'
        ),
        "spec.security.apiKeysSecretRef": (
            'Secret "keys" is not here: put it at FOLDER/keys/k and pass --files FOLDER'
        ),
    }


def test_a_secret_without_its_key_is_refused_and_taken_once_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "k").touch()
    assert problems(NAMES_FILES, tmp_path) == {
        "spec.model.secretRef": f'Secret "hub" lacks key "token" here: put it at {tmp_path}/hub/token'
    }
    (tmp_path / "hub" / "token").touch()
    assert problems(NAMES_FILES, tmp_path) == {}


def test_a_profile_that_is_not_there_is_refused() -> None:
    found = problems({"scheduling": {"predictor": {"profileConfigMap": "measured"}}})
    assert "FOLDER/measured/profile.json" in found["spec.scheduling.predictor.profileConfigMap"]


def test_what_takes_a_cluster_is_refused_with_what_to_do() -> None:
    found = problems({"prefill": {"nodes": 2}})
    assert list(found) == ["spec"]
    assert "spec.prefill.nodes is 2" in found["spec"]
    (field, reason), *others = problems({"scheduling": {"predictor": {"profilingJob": True}}}).items()
    assert (field, others) == ("spec.scheduling.predictor.profilingJob", [])
    assert reason.startswith("true needs a cluster")
    assert "use false" in reason


def test_only_a_running_service_may_be_paused() -> None:
    assert set(problems({"paused": True})) == {"spec.paused"}
    assert problems({"paused": True}, running=True) == {}
