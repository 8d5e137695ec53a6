"""Where the cluster suite finds a control plane: the variable, then what was downloaded, else a loud skip."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.control_plane import assets as found_in
from support.control_plane.assets import DISPOSABLE, OLDEST, PROGRAMS, assets, disposable_kubeconfig


def programs(folder: Path) -> Path:
    for place in (folder, folder / OLDEST):
        place.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            (place / name).write_text("")
            (place / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBEBUILDER_ASSETS", DISPOSABLE, "FLOWPREFILL_REQUIRE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(found_in, "DOWNLOADED", tmp_path / "downloaded")


def test_the_variable_comes_before_what_was_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs(tmp_path / "downloaded")
    assert assets("newest") == tmp_path / "downloaded"
    named = programs(tmp_path / "named")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(named))
    assert assets("newest") == named
    assert assets("oldest") == named / "1.34"


def test_without_either_a_test_skips_and_says_what_to_do() -> None:
    with pytest.raises(pytest.skip.Exception, match="`make control-plane`"):
        assets("newest")


def test_a_variable_that_names_half_a_control_plane_is_not_made_up_for_by_a_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs(tmp_path / "downloaded")
    named = programs(tmp_path / "named")
    (named / "etcd").unlink()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(named))
    with pytest.raises(pytest.skip.Exception, match=r"etcd not in .*named"):
        assets("newest")


def test_where_it_is_promised_its_absence_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWPREFILL_REQUIRE", "control-plane")
    with pytest.raises(pytest.fail.Exception):
        assets("newest")


def test_a_disposable_cluster_is_used_only_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert disposable_kubeconfig() is None
    monkeypatch.setenv(DISPOSABLE, str(tmp_path / "kind.kubeconfig"))
    with pytest.raises(AssertionError, match="which is no file"):
        disposable_kubeconfig()
    (tmp_path / "kind.kubeconfig").write_text("{}")
    assert disposable_kubeconfig() == tmp_path / "kind.kubeconfig"
