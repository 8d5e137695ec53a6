"""The image of a past release's operator: today's, which has the same requirements, with that release's sources first."""

from __future__ import annotations

from pathlib import Path

from support.control_plane.images import Image, cache_folder, image
from support.control_plane.images_buildah import Buildah
from support.releases import Release

TAG = "released"
INSIDE = Path("/opt/released")


def released_operator(release: Release, folder: Path) -> Image:
    """Build it; its archive lies in `folder`."""
    today = image("operator")
    buildah = Buildah(cache_folder() / "buildah")
    local = f"localhost/flowprefill/operator:{TAG}"
    environment = {"PYTHONPATH": release.python_path_at(INSIDE)}
    buildah.commit_with(today.archive, release.folder, str(INSIDE), environment, local)
    reference = f"docker.io/flowprefill/operator:{TAG}"
    archive = folder / f"operator-{TAG}.tar"
    buildah.export(local, archive, reference)
    return Image(reference=reference, archive=archive, size_over_base_bytes=today.size_over_base_bytes)
