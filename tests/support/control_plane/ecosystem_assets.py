"""Programs and manifests of projects that the operator works with. Never part of this project."""

from __future__ import annotations

import os
from pathlib import Path

from support.capabilities import require
from support.control_plane.assets import assets
from support.control_plane.images_pack import pack
from support.control_plane.node import Node

VARIABLE = "FLOWPREFILL_MANIFESTS"
"""Names a folder with `keda.yaml` and `prometheus-operator.yaml`, by which those projects' releases are installed."""


def ecosystem_program(name: str) -> Path:
    """A program beside those of the control plane; without it the test skips."""
    folder = assets("newest")
    require("ecosystem", os.access(folder / name, os.X_OK), f"{name} is not in {folder}")
    return folder / name


def ecosystem_manifest(name: str) -> Path:
    """A file in the folder that FLOWPREFILL_MANIFESTS names; without it the test skips."""
    named = os.environ.get(VARIABLE)
    found = Path(named or "/nonexistent", name)
    reason = f"{found} is no file" if named else f"{VARIABLE} does not name a folder with {name}"
    require("ecosystem", found.is_file(), reason)
    return found


def ecosystem_crd_files(group: str) -> list[Path]:
    """The CRDs of a group in the folder that FLOWPREFILL_CRDS names; without any the test skips."""
    folder = Path(os.environ.get("FLOWPREFILL_CRDS", "/nonexistent"))
    found = sorted(folder.glob(f"{group}_*.yaml"))
    require(
        "ecosystem", bool(found), f"no {group}_*.yaml in {folder}, the folder that FLOWPREFILL_CRDS names"
    )
    return found


def load_program(node: Node, image: str, program: str, path: str, folder: Path) -> None:
    """Give the node an image of one program, which is its entry point at `path`."""
    archive = pack(image, {path.lstrip("/"): ecosystem_program(program)}, [path], folder / f"{program}.tar")
    node.load_image(archive)
    archive.unlink()


def apply_files(node: Node, files: list[Path]) -> None:
    """Apply objects too large for kubectl's own annotation."""
    options = [option for file in files for option in ("-f", str(file))]
    node.plane.kubectl("apply", "--server-side", *options)


def delete_files(node: Node, files: list[Path]) -> None:
    options = [option for file in files for option in ("-f", str(file))]
    node.plane.kubectl("delete", "--ignore-not-found", "--timeout=100s", *options)
