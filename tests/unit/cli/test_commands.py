"""The command line as a person meets it: help, messages, exit codes, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flowprefill.cli import app
from support.services import document

RUN = CliRunner()
SAMPLES = Path(__file__).parents[3] / "crds" / "samples"
COMMANDS = [
    "up",
    "down",
    "status",
    "logs",
    "render",
    "demo",
    "serve",
    "proxy",
    "profile",
    "model pull",
    "version",
]


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / "valid.yaml"
    path.write_text(yaml.safe_dump(document()))
    return path


def broken(tmp_path: Path) -> Path:
    body = document()
    body["spec"]["sloClasses"][0]["ttftMilliseconds"] = "soon"
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = RUN.invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output
    assert len(done.output) > 200


def test_a_bare_call_shows_the_commands() -> None:
    output = RUN.invoke(app, []).output
    assert all(command.split()[0] in output for command in COMMANDS)


@pytest.mark.parametrize("command", ["up", "render"])
def test_a_bad_file_is_one_message_with_the_field_and_code_2(command: str, tmp_path: Path) -> None:
    arguments = [command, "-f", str(broken(tmp_path))]
    if command == "up":
        arguments += ["--state-dir", str(tmp_path / "state")]
    done = RUN.invoke(app, arguments)
    assert done.exit_code == 2
    assert "spec.sloClasses[0].ttftMilliseconds" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["up", "render"])
def test_a_missing_file_is_named(command: str, tmp_path: Path) -> None:
    done = RUN.invoke(app, [command, "-f", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2
    assert "none.yaml" in done.stderr


def test_a_dash_is_standard_input(valid: Path, tmp_path: Path) -> None:
    from_file = RUN.invoke(app, ["render", "-f", str(valid)])
    piped = RUN.invoke(app, ["render", "-f", "-"], input=valid.read_bytes())
    assert (piped.exit_code, piped.output) == (0, from_file.output)
    for command in ("render", "up"):
        done = RUN.invoke(app, [command, "-f", "-"], input=broken(tmp_path).read_bytes())
        assert done.exit_code == 2
        assert "standard input: spec.sloClasses[0].ttftMilliseconds" in done.stderr
        done = RUN.invoke(app, [command, "-f", "-"], input=b"\xff")
        assert done.exit_code == 2
        assert "standard input: is not UTF-8 text" in done.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_what_runs_one_service_takes_no_two(command: str, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump_all([document(), document(namespace="other")]))
    option = ["--state-dir", str(tmp_path / "state")] if command == "up" else []
    done = RUN.invoke(app, [command, "-f", str(path), *option])
    assert done.exit_code == 2
    assert "holds 2 services" in done.stderr


def test_up_refuses_what_this_machine_never_runs_before_anything_starts(tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = RUN.invoke(app, ["up", "-f", str(SAMPLES / "vllm-gpu.yaml"), "-d", "--state-dir", str(state)])
    assert done.exit_code == 2
    assert 'spec.engine.type: "vllm" does not run in this environment' in done.stderr
    assert "--files FOLDER" in done.stderr
    assert not list(state.rglob("*.yaml"))


@pytest.mark.parametrize("variable", [False, True], ids=["option", "XDG_STATE_HOME"])
def test_a_state_folder_that_cannot_be_made_is_one_line(
    valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    root = tmp_path / "file"
    root.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(root))
    option = [] if variable else ["--state-dir", str(root / "x")]
    done = RUN.invoke(app, ["up", "-f", str(valid), "-d", *option])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert f"state folder {root}/" in done.stderr
    assert "cannot be made (Not a directory)" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command", ["render -f FILE", "render -f FILE -k ServiceAccount", "status --state-dir none", "version"]
)
def test_output_to_a_full_disk_is_one_line(command: str, valid: Path) -> None:
    words = [str(valid) if word == "FILE" else word for word in command.split()]
    argv = [sys.executable, "-m", "flowprefill.cli", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "flowprefill: No space left on device\n")


def test_output_that_nobody_reads_any_more_ends_quietly(valid: Path) -> None:
    argv = [sys.executable, "-m", "flowprefill.cli", "render", "-f", str(valid)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_render_prints_yaml_with_one_object_a_document(sample: Path) -> None:
    done = RUN.invoke(app, ["render", "-f", str(sample)])
    assert done.exit_code == 0
    objects = list(yaml.safe_load_all(done.stdout))
    assert {"Deployment", "Service", "ConfigMap"} <= {item["kind"] for item in objects}
    live = next(o["data"]["live.json"] for o in objects if "live.json" in o.get("data", {}))
    assert json.loads(live)["sloClasses"]


def test_render_says_what_the_operator_would_not_act_on(valid: Path) -> None:
    body = yaml.safe_load(valid.read_text())
    body["spec"].setdefault("prefill", {})["nodes"] = 2
    valid.write_text(yaml.safe_dump(body))
    done = RUN.invoke(app, ["render", "-f", str(valid)])
    assert done.exit_code == 0
    assert "the operator does not act on this: spec.prefill.nodes is 2" in done.stderr
    assert list(yaml.safe_load_all(done.stdout))


def test_render_can_be_narrowed_to_kinds(valid: Path) -> None:
    done = RUN.invoke(app, ["render", "-f", str(valid), "-k", "service", "-k", "ServiceAccount"])
    kinds = {item["kind"] for item in yaml.safe_load_all(done.stdout)}
    assert kinds == {"Service", "ServiceAccount"}


def test_where_nothing_runs_status_and_down_say_so(tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path)]
    assert "no service runs here" in RUN.invoke(app, ["status", *state]).stdout
    assert json.loads(RUN.invoke(app, ["status", "--json", *state]).stdout) == {"services": []}
    assert "nothing runs" in RUN.invoke(app, ["down", *state]).stdout


@pytest.mark.parametrize("command", ["status", "down"])
def test_an_unknown_service_is_bad_input(command: str, tmp_path: Path) -> None:
    done = RUN.invoke(app, [command, "nobody", "--state-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "'nobody'" in done.stderr


def test_an_unknown_model_scheme_is_one_line(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["model", "pull", "s3://bucket/model"])
    assert done.exit_code == 1
    assert "hf://ORG/NAME" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert RUN.invoke(app, ["version"]).stdout.strip() == version("flowprefill")


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after a statement."""
    program = f"{statement}\nimport sys; sys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_itself_loads_neither_torch_nor_kopf_nor_the_operator() -> None:
    loaded = modules_after("import flowprefill.cli")
    assert loaded.isdisjoint(
        {"torch", "transformers", "kopf", "kubernetes", "flowprefill_operator", "fastapi"}
    )


def test_a_proxy_loads_no_torch() -> None:
    loaded = modules_after("import flowprefill.cli, flowprefill.proxy.main")
    assert loaded.isdisjoint({"torch", "transformers", "kopf", "flowprefill_operator"})


def test_a_server_loads_no_kopf_and_the_local_node_neither() -> None:
    node = (
        "import flowprefill_operator.node.run, flowprefill_operator.node.control, flowprefill_operator.plan"
    )
    for statement in ("import flowprefill.cli, flowprefill.server.main", node):
        assert modules_after(statement).isdisjoint({"kopf", "kubernetes"})
    assert modules_after(node).isdisjoint({"torch", "flowprefill"})
