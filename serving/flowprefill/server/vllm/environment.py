"""The environment of `vllm serve`, from that of its parent. Pure.

Variables that a user has set stay as they are; read off `vllm/envs.py` of vLLM 0.32.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowprefill.server.vllm.channel import KEY_VARIABLE
from flowprefill.server.vllm.flags import Launch
from flowprefill.server.vllm.plugin import NIXL_PROGRESS_DELAY

GIB = 2**30

NIXL_DELAY_US = "1000"
"""On CPUs every core is the model's. Sockets wake NIXL's thread before; seen were 1.5 % of a core at rest."""

PLUGIN = "flowprefill"
"""The name of our entry point in the group `vllm.general_plugins`."""

_SERVICE_LINK = re.compile(r"VLLM_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""What Kubernetes adds for a Service called `vllm`. vLLM takes them for its own and refuses to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the environment is made of, beside the launch. `kv_bytes` is the size of the KV cache on a CPU, 0 on a GPU.

    `advertise_host` and `kv_port` are where decode pods reach this pod's side channel. `gomp` is the OpenMP library that torch
    brings along; two of them in one process spin against each other.
    """

    channel_key: str | None
    advertise_host: str
    kv_port: int
    kv_bytes: int
    gomp: Path | None
    logging_config: Path | None


def environment(inherited: Mapping[str, str], launch: Launch, around: Surroundings) -> dict[str, str]:
    """All variables of the child."""
    variables = {name: value for name, value in inherited.items() if not _is_junk(name, value)}
    variables |= {
        # The model is on this machine by now, and nothing else is to be asked for.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    for name, value in _defaults(launch, around).items():
        variables.setdefault(name, value)
    if around.channel_key is not None:
        variables[KEY_VARIABLE] = around.channel_key
    if launch.preemptive:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if (plugins := variables.get("VLLM_PLUGINS")) is not None and PLUGIN not in plugins.split(","):
            variables["VLLM_PLUGINS"] = ",".join(filter(None, (plugins, PLUGIN)))
    if launch.device == "cpu" and around.gomp is not None:
        variables["LD_PRELOAD"] = _preloaded(variables.get("LD_PRELOAD", ""), around.gomp)
    return variables


def _defaults(launch: Launch, around: Surroundings) -> dict[str, str]:
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_LOGGING_LEVEL": launch.live.log_level.upper(),
    }
    if around.logging_config is not None:
        values["VLLM_LOGGING_CONFIG_PATH"] = str(around.logging_config)
    if launch.device == "cpu":
        threads = str(launch.config.engine.threads)
        values |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(-(-around.kv_bytes // GIB), 1)),
            # Without the node's CPU manager every pod would bind its threads to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
        }
    if launch.role != "colocated":
        values |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": around.advertise_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(around.kv_port),
        }
        if launch.device == "cpu":
            # Shared memory does not reach from pod to pod; on GPUs UCX finds the fastest way by itself.
            values["UCX_TLS"] = "tcp"
            values[NIXL_PROGRESS_DELAY] = NIXL_DELAY_US
    return values


def _is_junk(name: str, value: str) -> bool:
    """Whether it is what Kubernetes adds for a Service; a `VLLM_PORT` that is a number is a user's own."""
    return _SERVICE_LINK.fullmatch(name) is not None and not (name == "VLLM_PORT" and value.isdigit())


def _preloaded(preload: str, library: Path) -> str:
    names = [name for name in re.split(r"[ :]", preload) if name]
    if any(Path(name).name.startswith("libgomp") for name in names):
        return preload
    return ":".join([str(library), *names])
