"""/healthz, /readyz and /metrics of the operator's own process."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def health_app(
    metrics: CollectorRegistry, *, stalled: Callable[[], str | None], unready: Callable[[], str | None]
) -> web.Application:
    """`stalled` tells why the process should be restarted, `unready` why it is neither at work nor standing by; or None."""

    async def healthz(request: web.Request) -> web.Response:
        reason = stalled()
        return web.Response(text=reason or "ok", status=503 if reason else 200)

    async def readyz(request: web.Request) -> web.Response:
        reason = unready()
        return web.Response(text=reason or "ok", status=503 if reason else 200)

    async def show(request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encoder(metrics), headers={"content-type": content_type})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show)])
    return app


async def listen(app: web.Application, port: int) -> tuple[web.AppRunner, int]:
    """Serve on all addresses; the runner to clean up, and the port. Raises OSError when the port is taken."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(
            f"cannot listen on port {port} ({os.strerror(error.errno or 0)}); set another `port` in the configuration, or 0"
        ) from error
    return runner, int(runner.addresses[0][1])
