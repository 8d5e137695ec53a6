"""Where vLLM is on this machine, and the environment variables with which it runs well on few, shared cores."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from support.capabilities import require

ROOT = Path(__file__).parents[3]
KV_CACHE_GIB = 1
_OF_OUR_OWN = ("VLLM_", "PYTEST_", "COV_", "OMP_", "FLOWPREFILL_")
"""Variables of the test run that a server must not inherit, by prefix."""


def cache_directory() -> Path:
    """Where generated models and vLLM's own caches are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowprefill-tests"


def vllm_python() -> Path:
    """The interpreter that has vLLM, or a loud skip where there is none.

    FLOWPREFILL_VLLM_PYTHON names it, else VLLM_VENV the environment, else it is .venv-vllm of this checkout.
    """
    named = os.environ.get("FLOWPREFILL_VLLM_PYTHON")
    python = Path(named) if named else ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
    found = _version(python)
    require(
        "vllm", found is not None, f"{python} has no vLLM; run `make vllm-cpu` or set FLOWPREFILL_VLLM_PYTHON"
    )
    return python


def on_cpu(python: Path) -> bool:
    """Whether this interpreter's vLLM is the build for CPUs."""
    return (_version(python) or "").endswith("+cpu")


@functools.cache
def _version(python: Path) -> str | None:
    """The version of the distribution `vllm` there. Asks without importing it, which takes many seconds."""
    ask = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def environment(
    python: Path, *, kv_cache_gib: int = KV_CACHE_GIB, compiled: bool = False, plugins: bool = False
) -> dict[str, str]:
    """The variables of a server (or of transformers beside it): this process's own, less the test run's, and these.

    One thread, unpinned: OpenMP threads that spin on shared cores make everything several times slower. torch's own
    libgomp goes first, or a second one loads beside it. `compiled` lets torch.compile work and vLLM warm up. Without `plugins` vLLM loads none: it is stock vLLM whatever else is installed beside it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OUR_OWN)}
    if not plugins:
        kept["VLLM_PLUGINS"] = ""
    if (
        not compiled
    ):  # else a request's first logprobs compile a function for half a minute, --enforce-eager or not
        kept["TORCHDYNAMO_DISABLE"] = "1"
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": _libgomp(python),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(cache_directory() / "vllm"),
        "VLLM_CPU_CI_ENV": "0" if compiled else "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _libgomp(python: Path) -> str:
    """The path of the OpenMP library inside torch's wheel; empty where torch brings none."""
    site_packages = python.parent.parent / "lib"
    return next(map(str, sorted(site_packages.glob("python3*/site-packages/torch/lib/libgomp*.so*"))), "")
