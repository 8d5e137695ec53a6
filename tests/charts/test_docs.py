"""The chart's README, schema and metadata say what is so."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.generate import ROOT
from flowprefill_crd.samples import sample_path
from flowprefill_crd.v1alpha1 import KIND, VERSION
from flowprefill_operator.settings import PlanSettings
from support.helm import CHART, Helm


@pytest.fixture(scope="module")
def chart_docs() -> ModuleType:
    """scripts/chart_docs.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("chart_docs", ROOT / "scripts" / "chart_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chart_docs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the generator reads and writes."""
    for name in ("Chart.yaml", "values.yaml", "values.schema.json", "README.md", "README.md.in"):
        shutil.copy(CHART / name, tmp_path / name)
    return tmp_path


def chart() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return found


def annotation(name: str) -> Any:
    return yaml.safe_load(chart()["annotations"][f"artifacthub.io/{name}"])


def test_readme_and_schema_are_up_to_date(chart_docs: ModuleType) -> None:
    assert chart_docs.main(["--check"]) == 0


def test_every_value_has_a_row_with_its_default(chart_docs: ModuleType) -> None:
    rows = {}
    for line in (CHART / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            cells = line.strip("| ").split(" | ")
            rows[cells[0].strip("`")] = cells
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert rows["replicaCount"][1:3] == ["integer, 0 to 2", "`1`"]
    assert rows["logLevel"][1:3] == ["`debug`, `info`, `warning`, `error`", '`"info"`']
    for name in rows:
        found = values
        for step in name.split("."):
            found = found[step]
    # Keys at the top that are no row themselves have rows below them.
    assert {name.split(".")[0] for name in rows} == set(values)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("values.yaml", "# Least severity that the operator logs.\n", "", "logLevel has no comment above it"),
        ("values.yaml", "logLevel: info", "logLevels: info", "logLevels of values.yaml is missing"),
        (
            "values.yaml",
            "# Least severity that the operator logs.\nlogLevel: info\n",
            "",
            "logLevel of values.schema.json is missing",
        ),
        (
            "values.yaml",
            "  # Time between two scrapes of the operator.\n  interval: 30s\n",
            "",
            "monitoring.interval of values.schema.json is missing",
        ),
    ],
)
def test_values_and_schema_that_disagree_are_told(
    chart_docs: ModuleType,
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    old: str,
    new: str,
    said: str,
) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    assert chart_docs.main(["--chart", str(copy)]) == 1
    assert said in capsys.readouterr().err


def test_a_changed_comment_makes_the_check_fail_until_the_files_are_written(
    chart_docs: ModuleType, copy: Path
) -> None:
    values = copy / "values.yaml"
    values.write_text(values.read_text().replace("Least severity", "Lowest severity"))
    command = ["--chart", str(copy)]
    assert chart_docs.main([*command, "--check"]) == 1
    assert "Lowest" not in (copy / "README.md").read_text()
    assert chart_docs.main(command) == 0
    assert "Lowest severity" in (copy / "README.md").read_text()
    described = json.loads((copy / "values.schema.json").read_text())["properties"]["logLevel"]
    assert described["description"] == "Lowest severity that the operator logs."
    assert chart_docs.main([*command, "--check"]) == 0


def test_the_chart_is_of_the_projects_release() -> None:
    release = PlanSettings().proxy_image.rpartition(":")[2]
    assert chart()["version"] == chart()["appVersion"] == release
    assert annotation("license") == "Apache-2.0"
    assert all(
        change["kind"] in ("added", "changed", "fixed", "removed", "deprecated", "security")
        for change in annotation("changes")
    )


def test_artifact_hub_is_told_the_crd_and_a_sample_of_it() -> None:
    (crd,) = annotation("crds")
    assert (crd["kind"], crd["version"], crd["name"]) == (KIND, VERSION, CRD_NAME)
    assert annotation("crdsExamples") == [yaml.safe_load(sample_path("quickstart.yaml").read_text())]


def test_artifact_hub_is_told_the_images_that_are_used(helm: Helm) -> None:
    objects = helm.template()
    (deployment,) = [item for item in objects if item["kind"] == "Deployment"]
    (operator,) = deployment["spec"]["template"]["spec"]["containers"]
    planned = PlanSettings()
    used = {operator["image"], planned.proxy_image, *planned.images.values()}
    assert {image["image"] for image in annotation("images")} == used


def test_the_package_holds_no_sources_of_documentation(helm: Helm, tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    assert package.name == f"flowprefill-{chart()['version']}.tgz"
    names = helm("show", "readme", str(package)).stdout
    assert "## Values" in names
    with tarfile.open(package) as archive:
        members = archive.getnames()
    assert "flowprefill/values.schema.json" in members
    assert not [name for name in members if name.endswith(".in")]
