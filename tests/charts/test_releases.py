"""Where the release that an upgrade starts from is taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.helm import Helm
from support.releases import FIXTURE, SOURCES, last_release, last_tag


def git(root: Path, *args: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *args], cwd=root, check=True, capture_output=True, timeout=60)


def repository(root: Path, version: str) -> Path:
    """A repository whose one commit has the chart in some version; the chart's file."""
    for source in SOURCES:
        (root / source).mkdir(parents=True)
        (root / source / "__init__.py").touch()
    chart = root / SOURCES[0] / "Chart.yaml"
    (chart.parent / "templates").mkdir()
    chart.write_text(f"apiVersion: v2\nname: flowprefill\nversion: {version}\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "chart")
    return chart


def test_it_is_that_of_the_last_tag_and_not_of_the_working_tree(helm: Helm, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    chart = repository(root, "1.0.0")
    git(root, "tag", "v1.0.0")
    chart.write_text("apiVersion: v2\nname: flowprefill\nversion: 2.0.0\n")
    assert last_tag(root) == "v1.0.0"
    package = last_release(tmp_path / "work", root).chart(helm)
    assert "version: 1.0.0" in helm("show", "chart", str(package)).stdout


def test_before_a_first_tag_and_without_git_it_is_the_fixture(tmp_path: Path) -> None:
    untagged = tmp_path / "untagged"
    repository(untagged, "1.0.0")
    (tmp_path / "sources").mkdir()
    for root in (untagged, tmp_path / "sources"):
        folder = tmp_path / f"of-{root.name}"
        release = last_release(folder, root)
        assert release.folder == folder
        assert (folder / "operator/flowprefill_operator/controller/main.py").is_file()


def test_the_fixture_is_small_and_has_a_chart_that_helm_renders(helm: Helm, tmp_path: Path) -> None:
    assert FIXTURE.stat().st_size < 512 * 1024
    kinds = {item["kind"] for item in helm.template(chart=last_release(tmp_path, tmp_path).chart(helm))}
    assert {"Deployment", "CustomResourceDefinition", "ClusterRole"} <= kinds


def test_the_fixtures_operator_is_not_the_one_that_is_installed(tmp_path: Path) -> None:
    release = last_release(tmp_path / "release", tmp_path)
    where = "import flowprefill.cli, flowprefill_crd, flowprefill_operator as o; print(o.__file__, flowprefill.cli.__file__)"
    environment = {"PYTHONPATH": release.python_path, "PATH": ""}
    said = subprocess.run(
        [sys.executable, "-c", where], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert all(path.startswith(str(release.folder)) for path in said.stdout.split())
