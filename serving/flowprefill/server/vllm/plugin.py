"""vLLM's general plugin: the one function of vLLM that is replaced, and a switch for NIXL on small machines.

vLLM offers classes for scheduler, worker and executor, and none for the engine core's loop. So `EngineCoreProc.run_busy_loop`
is wrapped: without our section in `--additional-config` it is vLLM's own. Loaded in each of vLLM's processes, once.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

from flowprefill.engines.vllm_engine.supported import SETTINGS_KEY, SUPPORTED, installed_version

log = logging.getLogger("vllm.flowprefill")

NIXL_PROGRESS_DELAY = "FLOWPREFILL_NIXL_PROGRESS_DELAY_US"
"""Environment variable: microseconds that NIXL's progress thread may sleep at a time. Unset, it spins: one core per agent."""

_registered = False


def register() -> None:
    """The entry point `vllm.general_plugins`."""
    global _registered
    if _registered:
        return
    _registered = True
    found = installed_version()
    if found is None or found.partition("+")[0] != SUPPORTED:
        log.warning("flowprefill leaves vLLM %s as it is: supported is %s", found, SUPPORTED)
        return
    _replace_busy_loop()
    if (delay_us := os.environ.get(NIXL_PROGRESS_DELAY, "")).isdigit():
        _pace_progress_thread(int(delay_us))


def _replace_busy_loop() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    own = EngineCoreProc.run_busy_loop

    @functools.wraps(own)
    def run_busy_loop(self: Any) -> None:
        section = (self.vllm_config.additional_config or {}).get(SETTINGS_KEY)
        if section is None:  # not asked for: nothing of ours is loaded
            own(self)
            return
        from flowprefill.server.vllm import serving_core
        from flowprefill.server.vllm.core_settings import core_settings

        serving_core.run(self, core_settings(section))
        raise SystemExit

    EngineCoreProc.run_busy_loop = run_busy_loop


def _pace_progress_thread(delay_us: int) -> None:
    """Have each of NIXL's agents wait for its sockets, this long at a time. Its Python interface always says 0: a busy loop."""
    from vllm.distributed import nixl_utils  # sets UCX up before NIXL is imported

    agent_class = nixl_utils.NixlWrapper
    bindings = getattr(sys.modules.get(getattr(agent_class, "__module__", "")), "nixlBind", None)
    if bindings is None or not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        if agent_class is not None:
            log.warning("%s is set, and this NIXL has no such setting", NIXL_PROGRESS_DELAY)
        return
    make_agent = bindings.nixlAgent

    def paced_agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    bindings.nixlAgent = paced_agent
