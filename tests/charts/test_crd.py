"""The chart installs exactly the CRD of crds/, when its values say so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowprefill_crd.crd import CRD_NAME, custom_resource_definition
from flowprefill_crd.generate import ROOT
from support.capabilities import require

CHART = ROOT / "charts" / "flowprefill"
TEMPLATE = CHART / "templates" / "crds" / f"{CRD_NAME}.yaml"


@pytest.fixture(scope="module")
def helm() -> str:
    """Path of the helm binary: FLOWPREFILL_HELM, or the first on PATH."""
    path = os.environ.get("FLOWPREFILL_HELM") or shutil.which("helm")
    require("helm", path is not None, "no helm on PATH; install it or name the binary in FLOWPREFILL_HELM")
    assert path is not None
    return path


def run(helm: str, *arguments: str, cwd: Path) -> str:
    """What helm prints; its home is a throw-away folder."""
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd)}
    done = subprocess.run([helm, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered_crds(helm: str, tmp_path: Path, *values: str) -> list[dict[str, Any]]:
    """The CRDs that the chart renders with the values."""
    sets = [part for value in values for part in ("--set", value)]
    out = run(helm, "template", "release", str(CHART), *sets, cwd=tmp_path)
    objects = [item for item in yaml.safe_load_all(out) if item]
    return [item for item in objects if item["kind"] == "CustomResourceDefinition"]


def test_the_chart_holds_the_crd_of_crds_and_little_else() -> None:
    """Without the lines of Helm the template is the file in crds/, byte for byte."""
    lines = TEMPLATE.read_text().splitlines(keepends=True)
    plain = [line for line in lines if "{{" not in line and "helm.sh/resource-policy" not in line]
    assert "".join(plain) == (ROOT / "crds" / f"{CRD_NAME}.yaml").read_text()
    assert [line.strip() for line in lines if line not in plain] == [
        "{{- if .Values.crds.create }}",
        "{{- if .Values.crds.keep }}",
        "helm.sh/resource-policy: keep",
        "{{- end }}",
        "{{- end }}",
    ]


def test_the_crd_is_installed_and_kept_by_default() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text())["crds"] == {"create": True, "keep": True}


def test_the_values_schema_describes_the_crd_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    crds = schema["properties"]["crds"]
    assert set(crds["properties"]) == {"create", "keep"}
    assert crds["additionalProperties"] is False
    assert all(value["type"] == "boolean" and value["description"] for value in crds["properties"].values())


def test_helm_renders_the_crd_as_the_values_say(helm: str, tmp_path: Path) -> None:
    run(helm, "lint", str(CHART), cwd=tmp_path)
    (kept,) = rendered_crds(helm, tmp_path)
    assert kept["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    assert kept == custom_resource_definition()
    (removed,) = rendered_crds(helm, tmp_path, "crds.keep=false")
    assert removed == custom_resource_definition()
    assert rendered_crds(helm, tmp_path, "crds.create=false") == []


def test_helm_refuses_a_value_that_the_schema_does_not_know(helm: str, tmp_path: Path) -> None:
    command = [helm, "template", "release", str(CHART), "--set", "crds.install=true"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "install" in done.stderr
