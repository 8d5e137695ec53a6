"""The folder that holds one service on this machine.

ROOT/NAMESPACE/NAME/
  supervisor.lock   held by the running supervisor
  processes.lock    held by the supervisor and by the shim of every process: free means that nothing runs
  service.yaml      the FlowPrefillService to run; replaced as a whole, then SIGUSR1 to the supervisor
  options.json      how `up` was called
  status.json       what runs (NodeStatus), replaced at every change
  endpoints/        endpoints.json, which the proxy's file discovery watches
  config/           one folder a ConfigMap
  pods/             one folder a pod: its working directory and volumes
  logs/             one file a container, and supervisor.log
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from flowprefill_operator import labels


def default_root() -> Path:
    """`$XDG_STATE_HOME/flowprefill`, by default `~/.local/state/flowprefill`."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "flowprefill"


def default_claims() -> Path:
    """Where PersistentVolumeClaims lie on this machine; kept when a service goes, as a retained claim is."""
    return default_cache() / "flowprefill" / "claims"


def default_cache() -> Path:
    """`$XDG_CACHE_HOME`, by default `~/.cache`."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The specification says that a relative path is to be ignored.
    return Path(value) if value.startswith("/") else Path.home() / fallback


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Options(_Document):
    """How `up` was called; kept for the supervisor and for the next `up` of the same service.

    `port` is the port of the OpenAI API on this machine; None is the service's own, or the next free one. `files` holds
    a folder for each Secret and ConfigMap that the service names but does not own.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    files: Path | None = None


class ContainerReport(_Document):
    name: str
    phase: str
    ready: bool
    restarts: int
    pid: int | None
    message: str
    log: str


class PodReport(_Document):
    """A pod; `started_at` is seconds since the epoch, `ports` host ports by the names of the container ports."""

    name: str
    deployment: str
    role: str
    revision: str
    phase: str
    ready: bool
    terminating: bool
    restarts: int
    started_at: float
    message: str
    ports: dict[str, int]
    init_containers: tuple[ContainerReport, ...] = ()
    containers: tuple[ContainerReport, ...] = ()


class NodeStatus(_Document):
    """What the supervisor says of itself. `applied` is the digest of the service.yaml in use, `url` is where the API
    answers, `rollout` is empty or says what an unfinished rollout waits for, `error` why the last change was refused.
    While `paused`, the pods, `generation` and `revision` are those of the last service.yaml that was not."""

    service: str
    namespace: str
    pid: int
    started_at: float
    applied: str = ""
    generation: int = 0
    revision: str = ""
    url: str = ""
    ready: bool = False
    stopping: bool = False
    paused: bool = False
    rollout: str = ""
    error: str = ""
    error_digest: str = ""
    pods: tuple[PodReport, ...] = ()


class StateDir:
    """Paths and locks of one service's folder."""

    def __init__(self, root: Path, *, namespace: str, name: str) -> None:
        self.root = root
        self.path = root / namespace / name
        self.name = name
        self.namespace = namespace

    @property
    def service(self) -> Path:
        return self.path / "service.yaml"

    @property
    def endpoints(self) -> Path:
        return self.path / "endpoints" / labels.ENDPOINTS_KEY

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def pods(self) -> Path:
        return self.path / "pods"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    def create(self) -> Self:
        """Make the folder, readable by this user alone."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.logs, self.config, self.pods, self.endpoints.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        return self

    def is_running(self) -> bool:
        """Whether a supervisor runs this service."""
        return not _free(self.path / "supervisor.lock")

    def is_empty(self) -> bool:
        """Whether no process of the service is left, with or without a supervisor."""
        return _free(self.path / "processes.lock")

    def hold(self, name: str, *, wait_s: float) -> bool:
        """Hold `NAME.lock` until this process ends; False when another process still holds it after `wait_s`."""
        descriptor = self._open_lock(name)
        if _acquire(descriptor, wait_s):
            return True
        os.close(descriptor)
        return False

    @contextlib.contextmanager
    def lock(self, name: str, *, wait_s: float) -> Iterator[int | None]:
        """Hold `NAME.lock`; gives its descriptor, or None when another process still holds it after `wait_s`.

        The lock ends when this and every copy of the descriptor that a child inherited are closed.
        """
        descriptor = self._open_lock(name)
        try:
            yield descriptor if _acquire(descriptor, wait_s) else None
        finally:
            os.close(descriptor)

    def _open_lock(self, name: str) -> int:
        return os.open(self.path / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read_status(self) -> NodeStatus | None:
        """The last status written; None when there is none. It is current only while `is_running`."""
        try:
            return NodeStatus.model_validate_json((self.path / "status.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def write_status(self, status: NodeStatus) -> None:
        write_atomically(self.path / "status.json", status.model_dump_json(indent=1))

    def read_options(self) -> Options:
        try:
            return Options.model_validate_json((self.path / "options.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return Options()

    def write_options(self, options: Options) -> None:
        write_atomically(self.path / "options.json", options.model_dump_json(indent=1))

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the supervisor; False when none runs."""
        status = self.read_status()
        if status is None or not self.is_running():
            return False
        try:
            os.kill(status.pid, number)
        except ProcessLookupError:
            return False
        return True


def find(root: Path) -> list[StateDir]:
    """The folders of all services that were ever brought up under `root`, by namespace and name."""
    found = sorted(path.parent for path in root.glob("*/*/service.yaml"))
    return [StateDir(root, namespace=path.parent.name, name=path.name) for path in found]


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` so that a reader sees the old text or the new, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Give `folder` exactly these files; one whose text stays is not touched, so that watchers stay quiet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
    for path in folder.iterdir():
        if path.name not in files and path.is_file():
            path.unlink()


def write_json(path: Path, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def _acquire(descriptor: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
