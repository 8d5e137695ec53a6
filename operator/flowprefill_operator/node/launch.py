"""From a container of a pod to a command of this machine. Pure.

A container has its own file system, network and image; a process shares this machine's. So
- a path below a volume mount becomes the path of that volume's folder here,
- the value of a flag that ends in `port` and names a declared container port becomes the port the pod got here,
- `0.0.0.0` after `--host` (every interface of the pod) becomes the address that pods have here,
- an executable is looked for beside this Python first, then on PATH.
Everything else is passed on as written, after Kubernetes' own `$(NAME)` expansion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowprefill_operator.node.template import Container, EnvVar

ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][-A-Za-z0-9_.]*)\))")
_LABEL_PATH = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class CannotRun(Exception):
    """A container that this machine cannot run as a process; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """What a pod knows of itself through the downward API."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"

    def value(self, field_path: str) -> str:
        """The value of a `fieldRef`. Raises CannotRun for a field that a process has no answer to."""
        if match := _LABEL_PATH.fullmatch(field_path):
            values = self.labels if match[1] == "labels" else self.annotations
            return values.get(match[2], "")
        match field_path:
            case "metadata.name":
                return self.name
            case "metadata.namespace":
                return self.namespace
            case "metadata.uid":
                return self.name
            case "status.podIP" | "status.podIPs" | "status.hostIP" | "status.hostIPs":
                return self.address
            case "spec.nodeName":
                return "local"
            case "spec.serviceAccountName":
                return "default"
        raise CannotRun(f"environment from field {field_path!r} is not available on the local node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pod runs: `mounts` from a container's mount path to a folder here, `ports` from container to host
    port, `files` from (kind, object name) of ConfigMaps and Secrets to their folder here."""

    mounts: Mapping[str, Path]
    ports: Mapping[int, int]
    files: Mapping[tuple[str, str], Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command ready to start; `argv[0]` is still a name to look up on `env["PATH"]`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def launch(container: Container, identity: PodIdentity, place: Place, base_env: Mapping[str, str]) -> Launch:
    """The command and environment of `container` on this machine.

    `base_env` is this machine's own environment (PATH, HOME, proxies, caches); the container's variables win.
    Raises CannotRun when the container needs something that only an image or a cluster has.
    """
    if not container.command:
        raise CannotRun(
            f"container {container.name!r} has no command: its image's entry point is unknown on this machine; "
            f"give it a command in podTemplate"
        )
    env = dict(base_env)
    for variable in container.env:
        value = _variable(variable, identity, place)
        if value is not None:
            env[variable.name] = _local_path(expand(value, env), place.mounts)
    words = [expand(word, env) for word in (*container.command, *container.args)]
    return Launch(argv=tuple(_localise(words, identity.address, place)), env=env)


def expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' expansion: `$(NAME)` by the variable where it is set, `$$` by `$`, all else as written."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(replacement, text)


def _localise(words: list[str], address: str, place: Place) -> list[str]:
    local: list[str] = []
    flag = ""
    for word in words:
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
            local.append(f"{name}={_value(name, value, address, place)}")
            flag = ""
            continue
        local.append(_value(flag, word, address, place))
        flag = word if word.startswith("-") else ""
    return local


def _value(flag: str, value: str, address: str, place: Place) -> str:
    if flag.endswith("port") and value.isdigit() and int(value) in place.ports:
        return str(place.ports[int(value)])
    if flag == "--host" and value in ANY_ADDRESS:
        return address
    return _local_path(value, place.mounts)


def _local_path(value: str, mounts: Mapping[str, Path]) -> str:
    """`value` with the longest mount path that it lies below replaced."""
    for mount_path in sorted(mounts, key=len, reverse=True):
        inside = mount_path.rstrip("/")
        if value == inside or value.startswith(inside + "/"):
            return f"{mounts[mount_path]}{value[len(inside) :]}"
    return value


def _variable(variable: EnvVar, identity: PodIdentity, place: Place) -> str | None:
    source = variable.value_from
    if source is None:
        return variable.value
    if source.field_ref is not None:
        return identity.value(source.field_ref.field_path)
    for kind, ref in (("ConfigMap", source.config_map_key_ref), ("Secret", source.secret_key_ref)):
        if ref is None:
            continue
        folder = place.files.get((kind, ref.name))
        path = folder / ref.key if folder is not None else None
        if path is not None and path.is_file():
            return path.read_text()
        if ref.optional:
            return None
        raise CannotRun(f"environment variable {variable.name} needs key {ref.key!r} of {kind} {ref.name!r}")
    raise CannotRun(f"environment variable {variable.name} has a source that the local node does not know")
