"""What vLLM reads from the environment when it is imported, for an engine core inside this process."""

from __future__ import annotations

import os

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare() -> None:
    """Set what is not set. Call it before the first import of vLLM."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
