"""`flowprefill serve` as a person meets it, with files and without."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowprefill.cli import app
from support.pods import live_config, pod_config

RUN = CliRunner()


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    config, live = tmp_path / "config.json", tmp_path / "live.json"
    config.write_text(pod_config(engine={"type": "vllm"}).to_json())
    live.write_text(live_config().to_json())
    return ["--config", str(config), "--live", str(live)]


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("flowprefill.engines.vllm_engine.supported.version", missing)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config FILE or --engine vllm is missing"),
        (["--model", "org/m"], "--config FILE or --engine vllm is missing"),
        (["--engine", "vllm"], "--model MODEL is missing"),
        (["--engine", "vllm", "--", "--seed", "1"], "--model MODEL is missing"),
    ],
)
def test_a_call_that_names_no_pod_says_what_is_missing(arguments: list[str], words: str) -> None:
    done = RUN.invoke(app, ["serve", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--role", "prefill", "--engine", "vllm"], "--engine came with --config"),
        (["--role", "prefill", "--model", "org/m"], "--model came with --config"),
        (["--role", "prefill", "--", "--seed", "1"], "engine.args"),
        ([], "--role is missing"),
    ],
)
def test_files_and_flags_are_two_ways(documents: list[str], more: list[str], words: str) -> None:
    done = RUN.invoke(app, ["serve", *documents, *more])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.usefixtures("no_vllm")
def test_without_vllm_both_ways_say_what_to_install(documents: list[str]) -> None:
    for way in (["--role", "prefill", *documents], ["--engine", "vllm", "--model", "org/m"]):
        done = RUN.invoke(app, ["serve", *way])
        assert done.exit_code == 1
        assert "vLLM is not installed" in done.stderr
        assert "flowprefill[vllm]" in done.stderr


def test_flags_after_the_dashes_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowprefill.server.vllm.pod.installed_device", lambda: "cuda")
    done = RUN.invoke(
        app,
        [
            "serve",
            "--engine",
            "vllm",
            "--model",
            "org/m",
            "--port",
            "0",
            "--",
            "--enable-lora",
            "--port",
            "1",
        ],
    )
    assert done.exit_code == 1
    assert "--enable-lora: merge the adapter" in done.stderr
    assert "--port: set --port of flowprefill serve" in done.stderr


def test_the_parent_loads_neither_torch_nor_vllm() -> None:
    code = "import json, sys, flowprefill.cli, flowprefill.server.vllm.by_hand; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert {"torch", "transformers", "vllm", "kopf", "kubernetes"}.isdisjoint(json.loads(done.stdout))
