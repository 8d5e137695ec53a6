"""Where the chart that an upgrade starts from is taken."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.helm import CHART, Helm
from support.helm_charts import CHART_PATH, FIXTURE, chart_of, last_tag, released_chart


def git(root: Path, *args: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *args], cwd=root, check=True, capture_output=True, timeout=60)


def repository(root: Path, version: str) -> Path:
    """A repository whose one commit has the chart in some version."""
    chart = root / CHART_PATH
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text(f"apiVersion: v2\nname: flowprefill\nversion: {version}\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "chart")
    return chart


def test_it_is_the_chart_of_the_last_tag_and_not_of_the_working_tree(helm: Helm, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    chart = repository(root, "1.0.0")
    git(root, "tag", "v1.0.0")
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: flowprefill\nversion: 2.0.0\n")
    assert last_tag(root) == "v1.0.0"
    package = released_chart(helm, tmp_path / "work", root)
    assert "version: 1.0.0" in helm("show", "chart", str(package)).stdout
    assert chart_of("HEAD", helm, tmp_path / "again", root).name == package.name


def test_before_a_first_tag_and_without_git_it_is_the_packaged_fixture(helm: Helm, tmp_path: Path) -> None:
    untagged = tmp_path / "untagged"
    untagged.mkdir()
    repository(untagged, "1.0.0")
    sources = tmp_path / "sources"
    sources.mkdir()
    assert released_chart(helm, tmp_path, untagged) == FIXTURE
    assert released_chart(helm, tmp_path, sources) == FIXTURE


def test_the_fixture_is_a_small_package_that_helm_renders(helm: Helm) -> None:
    assert FIXTURE.stat().st_size < 64 * 1024
    kinds = {item["kind"] for item in helm.template(chart=FIXTURE)}
    assert {"Deployment", "CustomResourceDefinition", "ClusterRole"} <= kinds
    assert FIXTURE != CHART
