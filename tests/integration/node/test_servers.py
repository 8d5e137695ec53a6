"""The project's own servers on the local node, with the simulated engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.local_service import TIMEOUT_S, LocalService

SPEC: dict[str, Any] = {
    "model": {"uri": "embedded://smollm2-135m-instruct", "servedName": "small"},
    "engine": {"type": "simulated"},
    "sloClasses": [{"name": "chat", "ttftMilliseconds": 30_000, "default": True}],
    "termination": {"preStopSeconds": 1, "lameDuckSeconds": 1, "drainSeconds": 20},
}


def write(service: LocalService, **changed: Any) -> None:
    body = {
        "apiVersion": "flowprefill.io/v1alpha1",
        "kind": "FlowPrefillService",
        "metadata": {"name": service.name},
        "spec": SPEC | changed,
    }
    service.file.write_text(yaml.safe_dump(body))


def complete(url: str, **changed: Any) -> httpx.Response:
    body = {"model": "small", "prompt": "one two three", "max_tokens": 4} | changed
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("mode", ["Disaggregated", "Colocated"])
def test_a_request_is_answered_and_counted(service: LocalService, mode: str) -> None:
    write(service, mode=mode)
    service.up()
    answer = complete(service.status.url)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    screen = service.run("status").stdout
    assert "100.0 %" in screen
    assert f"revision {service.status.revision}" in screen
    service.run("down")
    assert service.processes() == []


def test_a_live_change_is_reported_once_every_pod_follows_it(service: LocalService) -> None:
    write(service)
    service.up()
    write(service, scheduling={"policy": "edf"})
    service.run("up", "-f", str(service.file), "--timeout", str(TIMEOUT_S))
    for pod in service.status.pods:
        path = "/v1/attainment" if pod.role == "proxy" else "/v1/state"
        with httpx.stream("GET", f"http://127.0.0.1:{pod.ports['admin']}{path}", timeout=10) as answer:
            line = next(answer.iter_lines())
        assert '"generation":2' in line.replace(" ", ""), (pod.name, line)


def test_a_new_revision_loses_no_request_of_a_client_that_keeps_asking(service: LocalService) -> None:
    write(service)
    service.up()
    url, old = service.status.url, service.status.revision
    stop = threading.Event()
    codes: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            codes.append(complete(url).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        write(service, engine={"type": "simulated", "blockSize": 32})
        service.run("up", "-f", str(service.file), "--timeout", str(TIMEOUT_S))
    finally:
        stop.set()
        asking.join()
    assert service.status.revision != old
    assert set(codes) == {200}


def test_a_stop_finishes_a_running_stream(service: LocalService) -> None:
    write(service)
    service.up()
    body = {
        "model": "small",
        "prompt": "one two three",
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
    }
    lines: list[str] = []
    with httpx.stream("POST", f"{service.status.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not lines:
                service.state.signal(signal.SIGTERM)
            lines.append(line)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    service.run("down")
    assert service.processes() == []


def test_a_benchmark_that_is_killed_takes_its_service_along(tmp_path: Path, service: LocalService) -> None:
    write(service)
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from flowprefill.cli.target import LocalTarget\n"
        "from flowprefill_crd import load_services\n"
        "(service,) = load_services(sys.argv[1])\n"
        "target = LocalTarget(Path(sys.argv[2]), service)\n"
        "target.apply(service)\n"
        'sys.stdout.write(f\'{target.url} {target.pid("prefill")} {target.admin_url("prefill")}\\n\')\n'
        "sys.stdout.flush()\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(service.file), str(service.root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    words: list[str] = []
    for line in process.stdout:
        if line.startswith("http"):
            words = line.split()
            break
    assert words, "the target came up"
    assert complete(words[0]).status_code == 200
    os.kill(int(words[1]), 0)
    process.kill()
    process.communicate()
    service.run("down", "--timeout", str(TIMEOUT_S), check=False)
    assert service.processes() == []
