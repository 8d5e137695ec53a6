"""A base image from Debian's packages, for machines that reach no image registry."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path

from support.control_plane.images_buildah import Buildah
from support.control_plane.node_network import command

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
NOT_KEPT = ("var/cache/apt/archives", "var/lib/apt/lists")
DEBOOTSTRAP_S = 900.0


def base_image(buildah: Buildah) -> str:
    """The name of the base image in the store; made once, in a minute or two."""
    key = hashlib.sha256(repr((SUITE, PACKAGES)).encode()).hexdigest()[:12]
    name = f"localhost/flowprefill-test-base:{key}"
    if buildah.has(name):
        return name
    with tempfile.TemporaryDirectory(dir=buildah.folder) as temporary:
        root = Path(temporary) / "root"
        include = f"--include={','.join(PACKAGES)}"
        command(
            "debootstrap",
            "--variant=minbase",
            include,
            SUITE,
            str(root),
            package_archive(),
            timeout_s=DEBOOTSTRAP_S,
        )
        for folder in NOT_KEPT:
            shutil.rmtree(root / folder)
            (root / folder).mkdir()
        buildah.commit_folder(root, name)
    return name


def package_archive() -> str:
    """The first archive that apt's own sources name for the suite. Raises LookupError when there is none."""
    folder = Path("/etc/apt/sources.list.d")
    for file in (
        *sorted(folder.glob("*.sources")),
        Path("/etc/apt/sources.list"),
        *sorted(folder.glob("*.list")),
    ):
        text = file.read_text("utf-8") if file.is_file() else ""
        for paragraph in re.split(r"\n\s*\n", text):
            fields = dict(re.findall(r"^(\w[\w-]*):[ \t]*(.*)$", paragraph, re.MULTILINE))
            if SUITE in fields.get("Suites", "").split() and fields.get("URIs"):
                return str(fields["URIs"].split()[0])
        if line := re.search(rf"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+{SUITE}\s", text, re.MULTILINE):
            return line[1]
    raise LookupError(f"apt's sources name no archive of {SUITE}")
