"""buildah with a store of its own, so that a test touches no image of this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

BUILD_S = 1800.0
SHORT_S = 300.0


class Buildah:
    """One store below `folder`. Layers stay in it, so that the next build starts from what is unchanged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._temporary = folder / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._policy = folder / "policy.json"
        self._policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder / "store"}"\nrunroot = "{folder / "run"}"\n'
        )
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "STORAGE_DRIVER"},
            "CONTAINERS_STORAGE_CONF": str(storage),
            "BUILDAH_ISOLATION": "oci",
            "TMPDIR": str(self._temporary),  # pip's cache mount lives there too
        }

    def build_flags(self, mounts: Mapping[Path, Path]) -> list[str]:
        """Flags of a build on this machine, with files and folders of it (by their place in the build) mounted."""
        flags = [
            "--layers",
            "--signature-policy",
            str(self._policy),
            "--network",
            "host",
            "--runtime",
            "runc",
        ]
        flags += ["--ulimit", "nofile=1024:1024"]
        for inside, outside in sorted(mounts.items()):
            flags += ["--volume", f"{outside}:{inside}:ro"]
        return flags

    def has(self, name: str) -> bool:
        return self._run("images", "--quiet", name, check=False).returncode == 0

    def num_images(self) -> int:
        """How many images the store holds, those without a name included."""
        return len(self._run("images", "--quiet").stdout.split())

    def size_bytes(self, name: str) -> int:
        """Size of an image, its base included."""
        images = json.loads(self._run("images", "--json", name).stdout)
        container = self._run("from", "--signature-policy", str(self._policy), "--pull-never", name)
        try:
            mounted = self._run("mount", container.stdout.strip()).stdout.strip()
            found = subprocess.run(
                ["du", "--summarize", "--apparent-size", "--block-size=1", mounted],
                capture_output=True,
                text=True,
                timeout=SHORT_S,
                check=True,
            )
            assert images, f"no image {name}"
            return int(found.stdout.split()[0])
        finally:
            self._run("rm", container.stdout.strip())

    def commit_folder(self, folder: Path, name: str) -> None:
        """Make an image of one layer from a folder."""
        container = self._run("from", "scratch").stdout.strip()
        try:
            mounted = self._run("mount", container).stdout.strip()
            subprocess.run(["cp", "-a", f"{folder}/.", mounted], timeout=SHORT_S, check=True)
            self._run("commit", "--signature-policy", str(self._policy), container, name)
        finally:
            self._run("rm", container)

    def commit_with(
        self, archive: Path, folder: Path, inside: str, environment: Mapping[str, str], name: str
    ) -> None:
        """Make an image from that of an archive, with a folder's content at `inside` and further environment."""
        policy = ("--signature-policy", str(self._policy))
        container = self._run("from", *policy, f"docker-archive:{archive}").stdout.split()[-1]
        try:
            self._run("add", "--quiet", container, str(folder), inside)
            settings = [f"--env={key}={value}" for key, value in environment.items()]
            self._run("config", *settings, container)
            self._run("commit", *policy, container, name)
        finally:
            self._run("rm", container)

    def export(self, name: str, archive: Path, reference: str) -> None:
        """Write an image as `docker save` does, under the name `reference`."""
        archive.unlink(missing_ok=True)
        target = f"docker-archive:{archive}:{reference}"
        self._run("push", "--quiet", "--signature-policy", str(self._policy), name, target)

    def clear(self) -> None:
        """Forget every image."""
        self._run("rm", "--all")
        self._run("rmi", "--all", "--force")

    def _run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run_logged(["buildah", *args], self.environment, SHORT_S, check=check)


def run_logged(
    argv: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program; with `check` an exit status other than 0 raises with the end of what it said."""
    done = subprocess.run(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        said = (done.stdout + done.stderr).strip()[-6000:]
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{said}")
    return done
