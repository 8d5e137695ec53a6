"""The commands inside pods: what their options say when they do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowprefill.cli import app
from support.pods import live_config, pod_config

RUN = CliRunner()


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """The options that name both documents."""
    (tmp_path / "config.json").write_text(pod_config().to_json())
    (tmp_path / "live.json").write_text(live_config().to_json())
    return ["--config", str(tmp_path / "config.json"), "--live", str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "seen"),
    [([], "neither"), (["--endpoints", "pods.json", "--discover", "kubernetes"], "both")],
)
def test_a_proxy_is_told_where_the_pods_are_in_exactly_one_way(
    documents: list[str], options: list[str], seen: str
) -> None:
    done = RUN.invoke(app, ["proxy", *documents, *options])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert f"{seen} came" in done.stderr
    assert "--endpoints FILE" in done.stderr
    assert "--discover kubernetes" in done.stderr


def test_another_way_to_discover_is_refused_with_those_that_there_are(documents: list[str]) -> None:
    done = RUN.invoke(app, ["proxy", *documents, "--discover", "consul"])
    assert done.exit_code == 2
    assert "kubernetes" in done.stderr


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"KUBECONFIG": "/nonexistent/config"}, "a kubeconfig, as this is no pod, gives no access"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"},
            "the pod's service account gives no access",
        ),
    ],
)
def test_without_credentials_a_proxy_says_what_is_missing_and_what_needs_none(
    documents: list[str], environment: dict[str, str], told: str
) -> None:
    ports = ["--port", "0", "--admin-port", "0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
    done = subprocess.run(
        [sys.executable, "-m", "flowprefill.cli", "proxy", *documents, "--discover", "kubernetes", *ports],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert told in last
    assert "--endpoints FILE needs none" in last
    assert "Traceback" not in done.stderr
