"""The harness around `vllm serve`, with a stand-in in its place: starts, failures told with the log, and nothing left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from flowprefill.errors import ModelNotLoadable
from support.vllm import server
from support.vllm.models import configuration, small
from support.vllm.server import VllmServer, vllm_server
from support.vllm.tokens import write_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's builds exist for Linux only")

STANDIN = """
import http.server, os, signal, subprocess, sys
how = os.environ["STANDIN"]
print("stand-in:", how, *sys.argv[1:], flush=True)
if how == "dies":
    sys.exit("no such device")
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif how == "leaves a late process":
    signal.signal(signal.SIGTERM, lambda *_: (subprocess.Popen(["sleep", "600"]), os._exit(0)))
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if how == "leaves a process":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if how == "leaves shared memory":
    held = open(f"/dev/shm/flowprefill-test-{os.getpid()}", "w"), open(f"/dev/shm/vllm_dist_{os.getpid()}", "w")
if how == "never ready":
    signal.pause()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose `vllm` is the stand-in."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{STANDIN}")
    program.chmod(0o755)
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 3.0)
    return program.with_name("python")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What the harness itself reads of a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(configuration(small("llama"))))
    write_tokenizer(directory)
    return directory


def test_a_server_is_ready_inside_and_gone_afterwards(python: Path, model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = {"flowprefill": {"policy": "s-edf"}}
    with vllm_server(
        python, model, log, flags=["--seed", "7"], additional_config=config, env={"STANDIN": "healthy"}
    ) as running:
        assert running.is_healthy()
        assert running.usage().processes == 1
    assert running.exit_code == 0
    assert not psutil.pid_exists(running.process.pid)
    said = log.read_text()
    assert f"serve {model} " in said
    assert said.rstrip().endswith(
        '--seed 7 --enforce-eager --additional-config {"flowprefill": {"policy": "s-edf"}}'
    )


def test_a_server_that_ends_at_once_fails_with_the_end_of_its_log(
    python: Path, model: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(AssertionError, match=r"(?s)ended with 1 before it was ready:.*no such device"),
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": "dies"}),
    ):
        pass


def test_a_server_that_is_never_ready_fails_and_is_ended(
    python: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "START_TIMEOUT_S", 1.0)
    started: list[VllmServer] = []
    wait = VllmServer.wait_until_healthy
    monkeypatch.setattr(VllmServer, "wait_until_healthy", lambda self: (started.append(self), wait(self)))
    with (
        pytest.raises(AssertionError, match=r"(?s)not ready within 1 s:.*stand-in: never ready"),
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": "never ready"}),
    ):
        pass
    assert started[0].process.poll() is not None


def test_a_server_that_ignores_sigterm_is_ended_and_told(python: Path, model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="did not end within 3 s of SIGTERM"),
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": "deaf"}) as running,
    ):
        pass
    assert running.exit_code == -9


@pytest.mark.parametrize("how", ["leaves a process", "leaves a late process"])
def test_a_process_left_behind_is_ended_and_told(python: Path, model: Path, tmp_path: Path, how: str) -> None:
    with (
        pytest.raises(AssertionError, match=r"left processes behind: \[\d+\]") as failure,
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": how}) as running,
    ):
        pass
    assert running.exit_code == 0
    (pid,) = map(int, str(failure.value).rstrip("]").split("[")[1:])
    assert not psutil.pid_exists(pid)


def test_shared_memory_left_behind_is_removed_and_told(python: Path, model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(
            AssertionError, match=r"left shared memory behind: \['/dev/shm/flowprefill-test-\d+'\]"
        ),
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": "leaves shared memory"}) as running,
    ):
        pass
    for name in ("flowprefill-test-", "vllm_dist_"):
        assert not Path(f"/dev/shm/{name}{running.process.pid}").exists()


def test_a_failing_test_ends_its_server_too(python: Path, model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": "deaf"}) as running,
    ):
        raise ZeroDivisionError
    assert running.process.poll() is not None


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(
    python: Path, model: Path, tmp_path: Path
) -> None:
    (model / "tokenizer.json").unlink()
    with (
        pytest.raises(ModelNotLoadable, match=r"has no tokenizer\.json; accepted are"),
        vllm_server(python, model, tmp_path / "log", env={"STANDIN": "healthy"}),
    ):
        pass
    assert not (tmp_path / "log").exists()
