"""`make control-plane` against a local server of fake releases: whole, checked, resumed, and clear about what failed."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="official programs exist for Linux only")

SCRIPT = Path(__file__).parents[3] / "scripts" / "control_plane.py"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PINS = 'newest = "1.37.2"\noldest = "1.34.4"\netcd = "3.6.16"\n\n[sha256]\n'


class Releases:
    """A server of releases. `cut` ends the first download of a path after so many bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.requests: list[tuple[str, str | None]] = []
        releases = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("range")
                releases.requests.append((self.path, wanted))
                body = releases.files.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                found = re.fullmatch(r"bytes=(\d+)-", wanted or "")
                start = int(found[1]) if found else 0
                if found and start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if found else 200)
                self.send_header("content-length", str(len(body) - start))
                self.end_headers()
                end = releases.cut.pop(self.path, len(body))
                self.wfile.write(body[start:end])

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Releases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def downloads(self, name: str) -> list[str | None]:
        """The ranges asked for of files of that name."""
        return [wanted for path, wanted in self.requests if path.endswith(f"/{name}")]


@pytest.fixture
def releases() -> Iterator[Releases]:
    with Releases() as found:
        for version in ("1.37.2", "1.34.4"):
            for arch in ("amd64", "arm64"):
                for program in PROGRAMS:
                    path = f"/k8s/v{version}/bin/linux/{arch}/{program}"
                    body = f"#!/bin/sh\necho {program} {version}\n".encode() + b"#" * 100_000
                    found.files[path] = body
                    found.files[f"{path}.sha256"] = hashlib.sha256(body).hexdigest().encode()
        sums = ""
        for arch in ("amd64", "arm64"):
            name = f"etcd-v3.6.16-linux-{arch}.tar.gz"
            body = archive({f"etcd-v3.6.16-linux-{arch}/etcd": b"#!/bin/sh\necho etcd 3.6.16\n"})
            found.files[f"/etcd/v3.6.16/{name}"] = body
            sums += f"{hashlib.sha256(body).hexdigest()}  {name}\n"
        found.files["/etcd/v3.6.16/SHA256SUMS"] = sums.encode()
        yield found


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as out:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            out.addfile(member, io.BytesIO(body))
    return packed.getvalue()


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    file = tmp_path / "pins.toml"
    file.write_text(PINS)
    return file


def run(releases: Releases, folder: Path, pins: Path, *more: str) -> subprocess.CompletedProcess[str]:
    urls = ["--kubernetes-url", f"{releases.url}/k8s", "--etcd-url", f"{releases.url}/etcd"]
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--pins", str(pins), *urls, *more]
    environment = {"NO_PROXY": "*", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def path_of(releases: Releases, name: str, version: str = "1.37.2") -> str:
    """The path of this machine's program as it was asked for."""
    (found,) = {p for p, _ in releases.requests if p.endswith(f"/{name}") and version in p}
    return found


def test_both_releases_lie_where_the_tests_look_and_run(
    releases: Releases, tmp_path: Path, pins: Path
) -> None:
    folder = tmp_path / "assets"
    done = run(releases, folder, pins)
    assert done.returncode == 0, done.stderr
    for place, version in ((folder, "1.37.2"), (folder / "1.34", "1.34.4")):
        for program in PROGRAMS:
            said = subprocess.run([place / program], capture_output=True, text=True, check=True).stdout
            assert said == f"{program} {version}\n"
        assert (
            subprocess.run([place / "etcd"], capture_output=True, text=True, check=True).stdout
            == "etcd 3.6.16\n"
        )
    assert "9 of 9 by the checksum that their release publishes" in done.stderr


def test_what_is_there_is_not_downloaded_again(releases: Releases, tmp_path: Path, pins: Path) -> None:
    run(releases, tmp_path / "assets", pins)
    releases.requests.clear()
    assert run(releases, tmp_path / "assets", pins).returncode == 0
    assert all(releases.downloads(program) == [] for program in PROGRAMS)


def test_a_program_that_was_changed_is_downloaded_again(
    releases: Releases, tmp_path: Path, pins: Path
) -> None:
    folder = tmp_path / "assets"
    run(releases, folder, pins)
    (folder / "kubectl").write_text("something else")
    assert run(releases, folder, pins).returncode == 0
    assert "kubectl 1.37.2" in (folder / "kubectl").read_text()


def test_a_download_that_breaks_off_goes_on_where_it_ended(
    releases: Releases, tmp_path: Path, pins: Path
) -> None:
    folder = tmp_path / "assets"
    for path in list(releases.files):
        if "v1.37.2" in path and path.endswith("/kubectl"):
            releases.cut[path] = 30_000
    done = run(releases, folder, pins)
    assert done.returncode == 0, done.stderr
    asked = [wanted for path, wanted in releases.requests if path == path_of(releases, "kubectl")]
    assert asked == [None, "bytes=30000-"]
    assert (folder / "kubectl").read_bytes() == releases.files[path_of(releases, "kubectl")]


def test_a_file_with_another_checksum_is_thrown_away(releases: Releases, tmp_path: Path, pins: Path) -> None:
    folder = tmp_path / "assets"
    for path in list(releases.files):
        if path.endswith("/kube-scheduler"):
            releases.files[path] += b"tampered"
    done = run(releases, folder, pins)
    assert done.returncode == 1
    assert "kube-scheduler has the SHA-256" in done.stderr
    assert not list(folder.glob("kube-scheduler*"))
    assert "Traceback" not in done.stderr


def test_a_pinned_checksum_stands_over_a_published_one(
    releases: Releases, tmp_path: Path, pins: Path
) -> None:
    folder = tmp_path / "assets"
    assert run(releases, folder, pins, "--pin").returncode == 0
    assert len(re.findall(r'^"[^"]+" = "[0-9a-f]{64}"$', pins.read_text(), re.MULTILINE)) == 9
    path = path_of(releases, "kubectl")
    releases.files[path] += b"changed release"
    releases.files[f"{path}.sha256"] = hashlib.sha256(releases.files[path]).hexdigest().encode()
    (folder / "kubectl").unlink()
    done = run(releases, folder, pins)
    assert done.returncode == 1
    assert "kubectl has the SHA-256" in done.stderr


def test_pins_alone_are_enough(releases: Releases, tmp_path: Path, pins: Path) -> None:
    run(releases, tmp_path / "assets", pins, "--pin")
    releases.files = {
        p: body for p, body in releases.files.items() if not p.endswith((".sha256", "SHA256SUMS"))
    }
    done = run(releases, tmp_path / "other", pins)
    assert done.returncode == 0, done.stderr
    assert "by the checksum that their release publishes" not in done.stderr


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (
            "newest = '9.9.9'\noldest = '1.34.4'\netcd = '3.6.16'\n[sha256]\n",
            "404; is that version released?",
        ),
        ("newest = 'latest'\noldest = '1.34.4'\netcd = '3.6.16'\n[sha256]\n", "'latest' is no version"),
        ("newest = '1.37.2'\n", "it needs newest, oldest, etcd and [sha256]"),
    ],
)
def test_pins_that_cannot_be_used_are_told_in_one_line(
    releases: Releases, tmp_path: Path, pins: Path, break_it: str, says: str
) -> None:
    pins.write_text(break_it)
    done = run(releases, tmp_path / "assets", pins)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_away_is_told(tmp_path: Path, pins: Path) -> None:
    with Releases() as gone:
        pass
    done = run(gone, tmp_path / "assets", pins)
    assert done.returncode == 1
    assert "is this machine online?" in done.stderr
