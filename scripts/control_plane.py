"""Downloads the official release programs of a Kubernetes control plane, for the cluster tests: `make control-plane`.

The folder afterwards is one for KUBEBUILDER_ASSETS: etcd, kube-apiserver, kube-controller-manager, kube-scheduler and
kubectl of the newest supported Kubernetes, and in a folder below it, named by its minor version, the oldest's. The tests
find it in its default place without the variable. Versions and checksums are in control_plane.toml.

A download that breaks off is taken up again where it ended, also by the next run. A file is in its place only when it is
whole and its checksum is right.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

ROOT = Path(__file__).parents[1]
PINS = ROOT / "scripts" / "control_plane.toml"
FOLDER = ROOT / ".cache" / "control-plane"
KUBERNETES_URL = "https://dl.k8s.io/release"
ETCD_URL = "https://github.com/etcd-io/etcd/releases/download"

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
ATTEMPTS = 4
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0
MAX_SUMS_BYTES = 1 << 20
MAX_PROGRAM_BYTES = 1 << 30

console = Console(stderr=True)


class Unavailable(Exception):
    """What is wanted cannot be had; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Versions, and the checksums (hex) that are pinned, by `version/architecture/file`."""

    newest: str
    oldest: str
    etcd: str
    sha256: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One file of a release. `published` is where its release publishes its checksum, alone or in a list."""

    key: str
    url: str
    published: str
    target: Path


def read_pins(file: Path) -> Pins:
    """The pins in a file. Raises `Unavailable` when they cannot be used."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        pins = Pins(**{key: found[key] for key in ("newest", "oldest", "etcd", "sha256")})
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise Unavailable(
            f"{file} cannot be used: {error!r}; it needs newest, oldest, etcd and [sha256]"
        ) from error
    for version in (pins.newest, pins.oldest, pins.etcd):
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            raise Unavailable(f"{file}: {version!r} is no version; write one such as 1.37.2")
    return pins


def architecture() -> str:
    """The name that releases have for this machine. Raises `Unavailable` where there are none."""
    found = MACHINES.get(platform.machine().lower())
    if sys.platform != "linux" or found is None:
        raise Unavailable(
            f"Kubernetes publishes no control plane for {sys.platform} on {platform.machine()}; set "
            "FLOWPREFILL_TEST_KUBECONFIG to the kubeconfig of a disposable cluster, as kind makes it"
        )
    return found


def wanted(pins: Pins, arch: str, folder: Path, *, kubernetes: str, etcd: str) -> list[Wanted]:
    """Everything to download; etcd's archive stays beside its program, so that it can be checked again."""
    found: list[Wanted] = []
    minor = ".".join(pins.oldest.split(".")[:2])
    for version, place in ((pins.newest, folder), (pins.oldest, folder / minor)):
        for program in PROGRAMS:
            url = f"{kubernetes}/v{version}/bin/linux/{arch}/{program}"
            key = f"{version}/{arch}/{program}"
            found.append(Wanted(key=key, url=url, published=f"{url}.sha256", target=place / program))
    archive = f"etcd-v{pins.etcd}-linux-{arch}.tar.gz"
    base = f"{etcd}/v{pins.etcd}"
    found.append(
        Wanted(
            key=f"{pins.etcd}/{arch}/{archive}",
            url=f"{base}/{archive}",
            published=f"{base}/SHA256SUMS",
            target=folder / archive,
        )
    )
    return found


def checksum(http: httpx.Client, file: Wanted, pins: Pins) -> str:
    """The checksum that a file must have: the pinned one, else the published one."""
    pinned = pins.sha256.get(file.key)
    if pinned is not None:
        return pinned
    answer = _get(http, file.published)
    if len(answer.content) > MAX_SUMS_BYTES:
        raise Unavailable(f"{file.published} has {len(answer.content)} bytes; checksums are expected")
    name = file.url.rsplit("/", 1)[1]
    for line in answer.text.splitlines():
        digest, *names = line.split()
        if re.fullmatch(r"[0-9a-f]{64}", digest) and (not names or names[0].lstrip("*") == name):
            return digest
    raise Unavailable(f"{file.published} has no SHA-256 of {name}; it begins with {answer.text[:80]!r}")


def fetch(http: httpx.Client, file: Wanted, expected: str, progress: Progress) -> None:
    """Download a file unless it is there already. Raises `Unavailable`."""
    if file.target.is_file() and sha256(file.target) == expected:
        return
    part = file.target.with_name(f"{file.target.name}.{expected[:12]}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    task = progress.add_task(file.key, total=None)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _resume(http, file.url, part, progress, task)
            break
        except httpx.TransportError as error:
            if attempt == ATTEMPTS:
                raise Unavailable(
                    f"{file.url}: {error!r} after {ATTEMPTS} attempts; {part.stat().st_size if part.exists() else 0} "
                    "bytes are kept, run it again to go on"
                ) from error
    found = sha256(part)
    if found != expected:
        part.unlink()
        raise Unavailable(f"{file.url} has the SHA-256 {found}, not {expected}; it was thrown away")
    part.chmod(0o755)
    part.replace(file.target)


def _resume(http: httpx.Client, url: str, part: Path, progress: Progress, task: object) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})
    with http.stream("GET", url, headers=headers) as answer:
        if answer.status_code == 416:  # everything is here already, or nothing of this is right
            return
        _check(answer)
        whole = answer.status_code == 200
        length = answer.headers.get("content-length")
        total = None if length is None else int(length) + (0 if whole else have)
        progress.update(task, total=total, completed=0 if whole else have)  # type: ignore[arg-type]
        with part.open("wb" if whole else "ab") as out:
            for chunk in answer.iter_raw():
                out.write(chunk)
                progress.advance(task, len(chunk))  # type: ignore[arg-type]


def _get(http: httpx.Client, url: str) -> httpx.Response:
    try:
        answer = http.get(url)
    except httpx.TransportError as error:
        raise Unavailable(f"{url} cannot be reached: {error!r}; is this machine online?") from error
    _check(answer)
    return answer


def _check(answer: httpx.Response) -> None:
    if not answer.is_success:
        hint = "; is that version released?" if answer.status_code == 404 else ""
        raise Unavailable(f"{answer.request.url} answered {answer.status_code}{hint}")


def unpack_etcd(archive: Path, program: Path) -> None:
    """Put `etcd` of its release's archive in place."""
    with tarfile.open(archive) as packed:
        member = next((m for m in packed if m.isfile() and Path(m.name).name == "etcd"), None)
        inside = None if member is None or member.size > MAX_PROGRAM_BYTES else packed.extractfile(member)
        if inside is None:
            raise Unavailable(f"{archive} holds no program etcd")
        part = program.with_name("etcd.part")
        with part.open("wb") as out:
            while chunk := inside.read(CHUNK_BYTES):
                out.write(chunk)
    part.chmod(0o755)
    part.replace(program)


def sha256(file: Path) -> str:
    """Checksum of a file in hex."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def pin(file: Path, sums: Mapping[str, str]) -> None:
    """Write checksums into the file of pins; those of other versions go."""
    head, _, _ = file.read_text(encoding="utf-8").partition("[sha256]")
    lines = [f'"{key}" = "{digest}"' for key, digest in sorted(sums.items())]
    file.write_text("\n".join([f"{head}[sha256]", *lines, ""]), encoding="utf-8")


@contextmanager
def _alone(folder: Path) -> Iterator[IO[str]]:
    """One run at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def main(arguments: list[str] | None = None) -> int:
    """Download what is missing; 0 when everything is there."""
    parser = argparse.ArgumentParser(prog="control_plane.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to put it (default: %(default)s)")
    parser.add_argument(
        "--pins", type=Path, default=PINS, help="versions and checksums (default: %(default)s)"
    )
    parser.add_argument("--pin", action="store_true", help="write the checksums into the file of pins")
    parser.add_argument("--kubernetes-url", default=KUBERNETES_URL, help="a mirror of %(default)s")
    parser.add_argument("--etcd-url", default=ETCD_URL, help="a mirror of %(default)s")
    given = parser.parse_args(arguments)
    try:
        pins = read_pins(given.pins)
        files = wanted(
            pins, architecture(), given.folder, kubernetes=given.kubernetes_url, etcd=given.etcd_url
        )
        sums: dict[str, str] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        client = httpx.Client(follow_redirects=True, timeout=TIMEOUT_S)
        with _alone(given.folder), client as http, Progress(*columns, console=console) as progress:
            for file in files:
                sums[file.key] = checksum(http, file, pins)
                fetch(http, file, sums[file.key], progress)
            minor = ".".join(pins.oldest.split(".")[:2])
            for place in (given.folder, given.folder / minor):
                unpack_etcd(files[-1].target, place / "etcd")
    except (Unavailable, OSError, tarfile.TarError) as error:
        console.print(f"error: {error}", soft_wrap=True, highlight=False, markup=False, style="red")
        return 1
    if given.pin:
        pin(given.pins, sums)
    unpinned = sorted(set(sums) - set(pins.sha256))
    trusted = (
        f"; {len(unpinned)} of {len(sums)} by the checksum that their release publishes" if unpinned else ""
    )
    versions = f"Kubernetes {pins.newest} and {pins.oldest}, etcd {pins.etcd}"
    console.print(f"{versions}: checked{trusted}", soft_wrap=True, highlight=False)
    console.print(f"the tests find them in {given.folder}", soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
