"""The command line of `vllm serve`, from what a pod was told. Pure.

Read off `vllm serve --help=all` of vLLM 0.32.0. Ours come first and what a user adds comes last, where vLLM lets it win;
what would fight the engine is refused by name (`refused_flags`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowprefill.engines.models import ResolvedModel
from flowprefill.engines.vllm_engine.supported import SETTINGS_KEY
from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.profile import Profile
from flowprefill.server.vllm.core_settings import CoreSettings
from flowprefill.server.vllm.refused_flags import Flag, check, parsed
from flowprefill_crd import LiveConfig, PodConfig

ENGINE = "flowprefill.engines.vllm_engine"
SCHEDULER = f"{ENGINE}.scheduler.AllocatingScheduler"
WORKER = f"{ENGINE}.worker.PreemptiveWorker"
ONE_WORKER = f"{ENGINE}.executor.InProcessExecutor"
RANKED_WORKER = "flowprefill.server.vllm.ranks.worker.RankedWorker"
RANKS = "flowprefill.server.vllm.ranks.executor.RankedExecutor"

Device = Literal["cpu", "cuda"]
RoleName = Literal["prefill", "decode", "colocated"]

CONNECTOR = "NixlConnector"
STOPPED_IN_THE_MIDDLE = "ExampleConnector"
WHOLE_FOLDERS = {"kv_connector": "WholeFolders", "kv_connector_module_path": f"{ENGINE}.whole_folders"}
"""What takes the place of vLLM's ExampleConnector, which shows what a suspended prefill has stored so far."""

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}

MAX_PROMPTS = 256
"""Requests in one prefill pod that vLLM's runner holds at once: batches that run, are suspended or wait to be pulled."""

MAX_SLOTS = 256

CPU_BLOCK = 32
"""vLLM's attention on CPUs takes blocks of a multiple of so many tokens."""

COMPILES = frozenset({"--compilation-config", "--optimization-level", "--no-enforce-eager"})
"""Flags that ask for compilation, which a pod on a CPU does not do by itself: it takes minutes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the command line is made of.

    `model_len` is the model's own limit in tokens, `kv_cache_tokens` the size of the KV cache where it is decided here and
    not by vLLM from the device's memory. `channel` is the parent's socket.
    """

    role: RoleName
    config: PodConfig
    live: LiveConfig
    device: Device
    model: ResolvedModel
    model_len: int
    kv_cache_tokens: int | None
    host: str
    port: int
    channel: str | None = None
    profile: Profile | None = None
    keys_file: Path | None = None

    @property
    def tensor_parallel_size(self) -> int:
        part = self.config.decode if self.role == "decode" else self.config.prefill
        return part.tensor_parallel_size

    @property
    def block_size(self) -> int:
        """Tokens in a block: what was asked for, rounded up to what vLLM's attention takes."""
        step = CPU_BLOCK if self.device == "cpu" else 1
        return -(-self.config.engine.block_size // step) * step

    @property
    def longest(self) -> int:
        """The most tokens that a prompt with its answer can have, as far as is known here."""
        limit = self.config.model.max_model_len or self.model_len
        return limit if self.kv_cache_tokens is None else min(limit, self.kv_cache_tokens)

    @property
    def preemptive(self) -> bool:
        """Whether our engine runs in it. A decode pod is stock vLLM."""
        return self.role != "decode"


def command_line(launch: Launch, extra: Sequence[str] = ()) -> tuple[str, ...]:
    """What follows `vllm`. `extra` comes after `engine.args`. Raises `InvalidConfiguration`."""
    added = parsed((*launch.config.engine.args, *extra))
    check(added)
    ours: list[str] = ["serve", str(launch.model.path), *_of_the_service(launch), *_sizes(launch)]
    if launch.preemptive:
        ours += _of_the_engine(launch)
    if launch.device == "cpu" and not any(flag.name in COMPILES for flag in added):
        ours.append("--enforce-eager")
    transfer, rest = _kv_transfer(launch, added)
    return (*ours, *transfer, *(word for flag in rest for word in flag.words))


def additional_config(launch: Launch) -> dict[str, Any]:
    """Our part of vLLM's additional config, as the engine core reads it."""
    given: dict[str, Any] = {} if launch.config.predictor.warmup else {"warm_up_seconds": 0.0}
    settings = CoreSettings(
        live=launch.live,
        channel=launch.channel,
        profile=launch.profile,
        model=launch.model.name,
        revision=launch.model.revision,
        slots=min(launch.live.max_suspended + 1, MAX_SLOTS),
        max_gap_milliseconds=launch.config.engine.max_gap_milliseconds,
        operator_tile_tokens=launch.config.engine.operator_tile_tokens,
        **given,
    )
    return {SETTINGS_KEY: settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)}


def _of_the_service(launch: Launch) -> list[str]:
    config = launch.config
    words = [
        f"--served-model-name={config.model.served_name}",
        f"--host={launch.host}",
        f"--port={launch.port}",
        f"--dtype={config.engine.dtype}",
        f"--block-size={launch.block_size}",
        f"--tensor-parallel-size={launch.tensor_parallel_size}",
        # What is still in flight after the pod has drained ends before vLLM does.
        f"--shutdown-timeout={max(config.termination.drain_seconds, 1)}",
    ]
    if not launch.live.per_request_log:
        words.append("--disable-uvicorn-access-log")
    if launch.keys_file is not None:
        words += ["--config", str(launch.keys_file)]
    return words


def _sizes(launch: Launch) -> list[str]:
    config = launch.config
    words = []
    asked, tokens = config.model.max_model_len, launch.kv_cache_tokens
    if asked is not None:
        words.append(f"--max-model-len={asked}")
    elif tokens is None:
        words.append("--max-model-len=auto")  # the model's own, or what fits the device's memory
    else:
        words.append(f"--max-model-len={launch.longest}")
    if tokens is not None:
        # vLLM keeps one block for itself.
        words.append(f"--num-gpu-blocks-override={-(-tokens // launch.block_size) + 1}")
    return words


def _of_the_engine(launch: Launch) -> list[str]:
    answers = launch.config.decode.max_batch_size if launch.role == "colocated" else 0
    alone = launch.tensor_parallel_size == 1
    return [
        f"--scheduler-cls={SCHEDULER}",
        f"--worker-cls={WORKER if alone else RANKED_WORKER}",
        f"--distributed-executor-backend={ONE_WORKER if alone else RANKS}",
        "--no-async-scheduling",
        # Whole prompts and whole batches run in one step.
        f"--max-num-batched-tokens={max(launch.longest, launch.live.batch_token_budget)}",
        f"--max-num-seqs={MAX_PROMPTS + answers}",
        f"--additional-config={json.dumps(additional_config(launch), separators=(',', ':'))}",
    ]


def _kv_transfer(launch: Launch, added: Sequence[Flag]) -> tuple[list[str], list[Flag]]:
    """Our flag for the KV connector, and the user's flags without theirs.

    One `engine.args` serves both roles, so a connector that a user names is told the pod's role here.
    """
    given = [flag for flag in added if flag.name == "--kv-transfer-config"]
    rest = [flag for flag in added if flag.name != "--kv-transfer-config"]
    if launch.role == "colocated":
        return [], [*rest, *given]
    config: dict[str, Any] = {"kv_connector": CONNECTOR}
    if given:
        config = dict(_json_object(given))
    config.setdefault("kv_role", KV_ROLES[launch.role])
    if launch.preemptive and config.get("kv_connector") == STOPPED_IN_THE_MIDDLE:
        config |= WHOLE_FOLDERS
    if launch.device == "cpu" and config.get("kv_connector") == CONNECTOR:
        config.setdefault("kv_buffer_device", "cpu")
    if config.get("kv_connector") == CONNECTOR:
        lease = {"kv_lease_duration": launch.config.kv_transfer.lease_seconds}
        config["kv_connector_extra_config"] = lease | dict(config.get("kv_connector_extra_config") or {})
    return [f"--kv-transfer-config={json.dumps(config, separators=(',', ':'))}"], rest


def _json_object(flags: Sequence[Flag]) -> Mapping[str, Any]:
    flag = flags[-1]
    if len(flags) > 1 or flag.key is not None:
        raise InvalidConfiguration(
            f"{' '.join(flag.words)[:200]}: accepted is one --kv-transfer-config with a whole JSON object"
        )
    try:
        value = json.loads(flag.value or "")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidConfiguration(
            f"--kv-transfer-config is {str(flag.value)[:200]!r}; accepted is a JSON object such as "
            '{"kv_connector":"NixlConnector"}'
        )
    return value
