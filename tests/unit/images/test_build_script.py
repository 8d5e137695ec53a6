"""`make images` as far as the builder's command line."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "images" / "build.sh"


def _build(
    folder: Path, builders: list[str], *images: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script where only these builders exist; each prints its name and arguments."""
    for builder in builders:
        program = folder / builder
        program.write_text('#!/bin/sh\nprintf "ran %s" "${0##*/}"\nprintf " [%s]" "$@"\necho\n')
        program.chmod(0o755)
    for name in ("dirname", "sed", "git"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), *images],
        env={"PATH": str(folder), "HOME": os.environ["HOME"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _runs(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("ran ")]


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["docker", "podman", "buildah"], "docker"),
        (["podman", "buildah"], "podman"),
        (["buildah"], "buildah"),
    ],
)
def test_the_first_builder_that_is_there_builds(present: list[str], chosen: str, tmp_path: Path) -> None:
    runs = _runs(_build(tmp_path, present))
    assert [run.split()[1] for run in runs] == [chosen] * 3


def test_without_a_builder_it_says_what_to_install(tmp_path: Path) -> None:
    done = _build(tmp_path, [])
    assert done.returncode == 1
    assert "none of docker, podman and buildah is on PATH" in done.stderr
    assert "apt-get install buildah" in done.stderr


def test_images_are_named_as_the_operator_plans_them(tmp_path: Path) -> None:
    runs = _runs(_build(tmp_path, ["docker"]))
    tags = [run.partition("[-t] [")[2].partition("]")[0] for run in runs]
    release = version("flowprefill")
    assert tags == [f"flowprefill/{name}:{release}" for name in ("operator", "serving", "proxy")]


def test_registry_and_tag_name_the_images_and_push_them(tmp_path: Path) -> None:
    done = _build(tmp_path, ["docker"], "proxy", REGISTRY="r.example/team", TAG="dev", PUSH="1")
    build, push = _runs(done)
    assert "[-t] [r.example/team/flowprefill/proxy:dev]" in build
    assert "[--target] [proxy]" in build
    assert push == "ran docker [push] [r.example/team/flowprefill/proxy:dev]"


def test_only_arguments_that_are_set_reach_the_build_also_those_set_to_nothing(tmp_path: Path) -> None:
    (build,) = _runs(
        _build(
            tmp_path, ["docker"], "serving", TORCH_INDEX="", EMBEDDED_MODELS="a b", BUILD_FLAGS="--pull -q"
        )
    )
    assert "[--pull] [-q]" in build
    assert "[--build-arg] [TORCH_INDEX=] [--build-arg] [EMBEDDED_MODELS=a b]" in build
    assert "BASE=" not in build


@pytest.mark.parametrize(("image", "device"), [("serving-vllm", "cuda"), ("serving-vllm-cpu", "cpu")])
def test_the_images_with_vllm_are_built_when_asked_for_each_for_its_device(
    image: str, device: str, tmp_path: Path
) -> None:
    (build,) = _runs(_build(tmp_path, ["docker"], image, EMBEDDED_MODELS=""))
    assert f"[--build-arg] [DEVICE={device}] [--build-arg] [EMBEDDED_MODELS=]" in build
    assert "[-f] [images/serving-vllm/Dockerfile]" in build
    assert f"[-t] [flowprefill/{image}:{version('flowprefill')}]" in build


def test_one_images_settings_are_not_the_next_ones(tmp_path: Path) -> None:
    first, second, third = _runs(_build(tmp_path, ["docker"], "proxy", "serving-vllm-cpu", "operator"))
    assert ("--target" in first, "DEVICE" in first) == (True, False)
    assert ("--target" in second, "DEVICE" in second) == (False, True)
    assert ("--target" in third, "DEVICE" in third) == (False, False)


@pytest.mark.parametrize(
    ("images", "environment", "message"),
    [
        (
            ["vllm"],
            {},
            "there is no image vllm; accepted are operator, serving, proxy, serving-vllm and serving-vllm-cpu",
        ),
        ([], {"BUILDER": "kaniko"}, "BUILDER=kaniko is not accepted; use docker, podman or buildah"),
        ([], {"BUILDER": "podman"}, "BUILDER=podman is not on PATH"),
    ],
)
def test_what_it_cannot_do_is_refused(
    images: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = _build(tmp_path, ["docker"], *images, **environment)
    assert done.returncode == 1
    assert message in done.stderr
