"""A pod as a process of its own, with the simulated engine: what can be killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from flowprefill_operator.node.ports import free_ports
from support.pods import live_config, pod_config, until_async

START = (
    "import sys; from pathlib import Path; from flowprefill.server.main import run; "
    "role, config, live, *ports = sys.argv[1:]; "
    "sys.exit(run(role, Path(config), Path(live), '127.0.0.1', *map(int, ports)))"
)


@dataclass(slots=True, kw_only=True)
class PodProcess:
    """A running pod. `ports` are those of API, admin and KV; another one may be started on them afterwards."""

    process: asyncio.subprocess.Process
    api: httpx.AsyncClient
    admin: httpx.AsyncClient
    live: Path
    log: Path
    ports: tuple[int, ...]

    async def is_ready(self) -> bool:
        try:
            return (await self.admin.get("/ready")).status_code == 200
        except httpx.TransportError:
            assert self.process.returncode is None, self.log.read_text()
            return False

    async def metric(self, line_start: str) -> str | None:
        text = (await self.admin.get("/metrics")).text
        return next((line for line in text.splitlines() if line.startswith(line_start)), None)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def pod_process(
    tmp_path: Path,
    role: str,
    *,
    live_changes: dict[str, Any] | None = None,
    ports: tuple[int, ...] | None = None,
    **config: Any,
) -> AsyncIterator[PodProcess]:
    """A ready pod with its files in `tmp_path`, which is made where it is not there; killed afterwards."""
    tmp_path.mkdir(exist_ok=True)  # noqa: ASYNC240  # nothing else waits for this loop yet
    config_path, live, log = tmp_path / "config.json", tmp_path / "live", tmp_path / "log"
    config_path.write_text(pod_config(**config).to_json())
    live.mkdir(exist_ok=True)
    (live / "live.json").write_text(live_config(**(live_changes or {})).to_json())
    api, admin, kv = ports = tuple(free_ports(3)) if ports is None else ports
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, role, str(config_path), str(live), str(api), str(admin), str(kv)),
            stdout=output,
            stderr=output,
        )
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{api}", timeout=60) as api_client,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}", timeout=60) as admin_client,
        ):
            pod = PodProcess(
                process=process, api=api_client, admin=admin_client, live=live, log=log, ports=ports
            )
            await until_async(pod.is_ready, what="ready")
            yield pod
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
