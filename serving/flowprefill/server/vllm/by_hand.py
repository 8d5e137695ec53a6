"""A pod that somebody starts without files: its two documents from a model's name and flags of `vllm serve`."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.documents import LIVE_FILE, LiveDocument
from flowprefill.logs import configure_logging
from flowprefill.server.frame import RoleName
from flowprefill.server.settings import checked
from flowprefill.server.vllm.core_settings import DEFAULT_LIVE
from flowprefill.server.vllm.pod import run
from flowprefill.server.vllm.refused_flags import Flag, parsed
from flowprefill_crd import PodConfig
from flowprefill_crd.podconfig import PodDecode, PodEngine, PodModel, PodPrefill, PodTermination
from flowprefill_crd.v1alpha1.engine import Dtype

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_TIMES = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A pod's configuration, and the flags that are vLLM's alone."""

    config: PodConfig
    flags: tuple[str, ...]


def run_by_hand(
    *,
    model: str,
    role: RoleName,
    args: Sequence[str],
    live_path: Path | None,
    host: str,
    port: int,
    admin_port: int,
    kv_port: int,
) -> int:
    """Serve until stopped; the exit code. Without a live document one is made, and its path logged for who wants to edit it.

    Raises `InvalidConfiguration` or `ModelNotLoadable` when the pod cannot start.
    """
    pod = by_hand(model, role, args)
    with tempfile.TemporaryDirectory(prefix="flowprefill-live-") as folder:
        if live_path is None:
            live_path = Path(folder, LIVE_FILE)
            live_path.write_text(DEFAULT_LIVE.to_json(), encoding="utf-8")
        live = LiveDocument(live_path, checked)
        configure_logging(pod.config.log_format, live.current.log_level)
        log.info("live document", extra={"path": str(live_path)})
        return run(
            role,
            pod.config,
            live,
            host=host,
            port=port,
            admin_port=admin_port,
            kv_port=kv_port,
            extra=pod.flags,
        )


def by_hand(model: str, role: str, args: Sequence[str]) -> ByHand:
    """What `flowprefill serve --engine vllm --model MODEL -- ARGS` means.

    Flags of vLLM whose values have a place in our documents are moved there. Raises `InvalidConfiguration`.
    """
    uri, name = model_uri(model)
    values: dict[str, Flag] = {}
    rest: list[str] = []
    for flag in parsed(args):
        if flag.name in _MOVED and flag.key is None:
            values[flag.name] = flag
        else:
            rest += flag.words
    ranks = _number(values.get("--tensor-parallel-size"), least=1) or 1
    config = PodConfig(
        service="vllm",
        namespace="default",
        revision="by-hand",
        mode="Colocated" if role == "colocated" else "Disaggregated",
        model=PodModel(
            uri=uri,
            revision=_text(values.get("--revision")),
            served_name=_text(values.get("--served-model-name")) or name,
            max_model_len=_max_model_len(values.get("--max-model-len")),
        ),
        engine=PodEngine(
            type="vllm",
            dtype=_dtype(values.get("--dtype")),
            block_size=_number(values.get("--block-size"), least=1) or 16,
        ),
        prefill=PodPrefill(tensor_parallel_size=ranks),
        decode=PodDecode(tensor_parallel_size=ranks),
        # Nobody but the user has to notice that it stops.
        termination=PodTermination(pre_stop_seconds=0, lame_duck_seconds=0, drain_seconds=30),
        log_format="text",
    )
    return ByHand(config=config, flags=tuple(rest))


def model_uri(model: str) -> tuple[str, str]:
    """The URI and the name to serve of a model as people name it: a URI, a directory, or a repository of the hub."""
    scheme, separator, rest = model.partition("://")
    if separator:
        named = rest.partition("@")[0].rstrip("/")
        return model, named if scheme == "hf" else named.rpartition("/")[2]
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().as_uri(), path.resolve().name
    if _REPOSITORY.fullmatch(model):
        return f"hf://{model}", model
    raise InvalidConfiguration(
        f"model {model[:200]!r} is neither a directory of this machine nor ORG/NAME of the hub; accepted are these, "
        "hf://ORG/NAME[@REVISION], file:///PATH and embedded://NAME"
    )


_MOVED = frozenset(
    {
        "--block-size",
        "--dtype",
        "--max-model-len",
        "--revision",
        "--served-model-name",
        "--tensor-parallel-size",
    }
)


def _text(flag: Flag | None) -> str | None:
    if flag is None:
        return None
    if flag.value is None or len(flag.words) > 2:
        raise InvalidConfiguration(f"{' '.join(flag.words)[:200]}: accepted is one value")
    return flag.value


def _number(flag: Flag | None, *, least: int) -> int | None:
    text = _text(flag)
    if text is None:
        return None
    factor = _TIMES.get(text[-1:], 1)
    try:
        number = round(float(text.rstrip("kKmM")) * factor)
    except ValueError:
        number = least - 1
    if number < least:
        assert flag is not None
        raise InvalidConfiguration(f"{flag.name} is {text[:100]!r}; accepted are integers from {least}")
    return number


def _max_model_len(flag: Flag | None) -> int | None:
    return None if _text(flag) in ("auto", "-1") else _number(flag, least=1)


def _dtype(flag: Flag | None) -> Dtype:
    text = _text(flag) or "auto"
    whole = {"half": "float16", "float": "float32"}.get(text, text)
    for dtype in get_args(Dtype):
        if dtype == whole:
            return dtype  # type: ignore[no-any-return]
    raise InvalidConfiguration(
        f"--dtype is {text[:100]!r}; accepted are {', '.join(get_args(Dtype))}, half, float"
    )
