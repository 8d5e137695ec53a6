"""Where credentials come from, and what is said when there are none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flowprefill_operator.cluster.connect import NoCluster, credentials

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: it
contexts: [{name: it, context: {cluster: it, user: me}}]
clusters: [{name: it, cluster: {server: "https://api.example:6443"}}]
users: [{name: me, user: {token: t}}]
"""


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster around, and nobody's own kubeconfig."""
    for name in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


async def test_the_kubeconfig_that_is_named_is_used_and_those_beside_it_may_be_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "config"
    path.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/absent:{path}")
    found = await credentials()
    assert (found.configuration.host, found.namespace) == ("https://api.example:6443", None)


async def test_a_kubeconfig_that_is_not_there_is_told_so_and_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexist")
    with pytest.raises(
        NoCluster, match=r"^not inside a cluster, and /nonexist: no such file; name a kubeconfig"
    ):
        await credentials()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_without_any_kubeconfig_the_place_of_the_usual_one_is_told() -> None:
    with pytest.raises(NoCluster, match=r"~/\.kube/config: no such file; name a kubeconfig in KUBECONFIG$"):
        await credentials()


@pytest.mark.parametrize("text", ["", "kind: Config", "a: [", "just text"])
async def test_a_file_that_is_no_kubeconfig_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(NoCluster, match=f"{path} is no usable kubeconfig"):
        await credentials()
