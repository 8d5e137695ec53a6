"""Credentials: the pod's own inside a cluster, the user's kubeconfig elsewhere."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from flowprefill_operator.cluster.client import Cluster

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECTIONS = 64


class NoCluster(OSError):
    """No API server is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A configured client. `namespace` is the operator's own; None outside a cluster."""

    configuration: Configuration
    namespace: str | None


async def credentials() -> Credentials:
    """In-cluster credentials, whose token is read anew as it is rotated, or the kubeconfig's. Raises `NoCluster`."""
    configuration = Configuration()
    namespace = os.environ.get("POD_NAMESPACE")
    try:
        kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        namespace = namespace or _own_namespace()
    except kube_config.ConfigException:
        where = os.environ.get("KUBECONFIG") or "~/.kube/config"
        if not _any_is_there(where):
            raise NoCluster(
                f"not inside a cluster, and {where}: no such file; name a kubeconfig in KUBECONFIG"
            ) from None
        try:
            await kube_config.load_kube_config(where, client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (
            kube_config.ConfigException,
            OSError,
            yaml.YAMLError,
            TypeError,
            KeyError,
            ValueError,
        ) as error:
            # The last three are how the client answers a file that is YAML and no kubeconfig.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NoCluster(
                f"not inside a cluster, and {where} is no usable kubeconfig ({reason}); name one in KUBECONFIG"
            ) from error
    configuration.connection_pool_maxsize = CONNECTIONS
    return Credentials(configuration=configuration, namespace=namespace)


def _any_is_there(paths: str) -> bool:
    """Whether there is one of the files that a variable such as KUBECONFIG names."""
    return any(Path(name).expanduser().exists() for name in paths.split(os.pathsep) if name)


def _own_namespace() -> str | None:
    return NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.is_file() else None


@asynccontextmanager
async def connected(found: Credentials) -> AsyncIterator[tuple[Cluster, Any]]:
    """A cluster and the client below it, closed at the end. The client's type has no annotations."""
    async with ApiClient(found.configuration) as api:
        yield Cluster(api), api
