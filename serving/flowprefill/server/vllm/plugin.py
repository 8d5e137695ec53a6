"""vLLM's general plugin: the one function of vLLM that is replaced, and a switch for NIXL on small machines.

vLLM offers classes for scheduler, worker and executor, and none for the engine core's loop. So `EngineCoreProc.run_busy_loop`
is wrapped: without our section in `--additional-config` it is vLLM's own. Loaded in each of vLLM's processes, once.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

log = logging.getLogger("vllm.flowprefill")

NIXL_PROGRESS_THREAD = "FLOWPREFILL_NIXL_PROGRESS_THREAD"
"""Environment variable: "0" leaves out NIXL's progress thread, which spins one core per agent."""

SETTINGS_KEY = "flowprefill"
"""Our section of vLLM's `--additional-config`."""

_registered = False


def register() -> None:
    """The entry point `vllm.general_plugins`."""
    global _registered
    if _registered:
        return
    _registered = True
    from flowprefill.engines.vllm_engine.supported import SUPPORTED, installed_version

    found = installed_version()
    if found is None or found.partition("+")[0] != SUPPORTED:
        log.warning("flowprefill leaves vLLM %s as it is: supported is %s", found, SUPPORTED)
        return
    _replace_busy_loop()
    if os.environ.get(NIXL_PROGRESS_THREAD) == "0":
        _leave_out_progress_thread()


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


def _leave_out_progress_thread() -> None:
    try:
        from nixl._api import nixl_agent_config
    except ImportError:
        return  # no NIXL here
    configure = nixl_agent_config.__init__

    def without_progress_thread(self: Any, *args: Any, **kwargs: Any) -> None:
        configure(self, *args, **{**kwargs, "enable_prog_thread": False})

    nixl_agent_config.__init__ = without_progress_thread
