"""Probes as Kubernetes declares them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import httpx

from flowprefill_operator.node.template import Probe

Resolve = Callable[[int | str], tuple[str, int]]
"""Host and port here of a container port, by number or name."""


async def attempt(probe: Probe, resolve: Resolve, client: httpx.AsyncClient) -> str | None:
    """Run the probe once; None when it succeeds, else why it failed."""
    try:
        if probe.http_get is not None:
            host, port = resolve(probe.http_get.port)
            scheme = probe.http_get.scheme.lower()
            url = f"{scheme}://{host}:{port}/{probe.http_get.path.removeprefix('/')}"
            response = await client.get(url, timeout=probe.timeout_seconds)
            if 200 <= response.status_code < 400:
                return None
            return f"GET {probe.http_get.path} answered {response.status_code}"
        if probe.tcp_socket is not None:
            host, port = resolve(probe.tcp_socket.port)
            async with asyncio.timeout(probe.timeout_seconds):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return None
    except (OSError, TimeoutError, httpx.HTTPError) as error:
        return f"no answer: {str(error) or type(error).__name__}"
    except KeyError as error:
        return f"the container declares no port named {error}"
    # An exec or gRPC probe runs inside an image; a process counts as healthy while it runs.
    return None


def client() -> httpx.AsyncClient:
    """An HTTP client for probes: a new connection each time, as a kubelet does, and certificates unchecked."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return httpx.AsyncClient(
        verify=context,
        trust_env=False,
        limits=httpx.Limits(max_keepalive_connections=0),
        follow_redirects=False,
    )


async def until_settled(
    probe: Probe,
    resolve: Resolve,
    http: httpx.AsyncClient,
    *,
    state: bool | None,
    on_failure: Callable[[str], None],
) -> bool:
    """Probe until the thresholds say something other than `state`; the new state.

    `state` is True (passing), False (failing) or None (not known yet). `on_failure` gets each failed attempt's
    reason. Waits `periodSeconds` before each attempt except when the state is not known yet.
    """
    successes = failures = 0
    first = state is None
    while True:
        if not first:
            await asyncio.sleep(probe.period_seconds)
        first = False
        problem = await attempt(probe, resolve, http)
        if problem is None:
            successes, failures = successes + 1, 0
        else:
            on_failure(problem)
            successes, failures = 0, failures + 1
        if successes >= probe.success_threshold and state is not True:
            return True
        if failures >= probe.failure_threshold and state is not False:
            return False
