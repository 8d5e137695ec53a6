"""A program that behaves like `vllm serve` with our plugin, as far as its parent can see.

`python fake_vllm.py serve MODEL FLAGS ...` listens on `--host` and `--port`; `/health` is 503 until its engine is loaded,
`/metrics` tells how many requests it has. Its "engine core" is a process of its own, which opens the channel that the flags
name, sends what the messages file holds and appends what it hears to `heard`. The folder in $FAKE_VLLM:

    loading        while it is there, the engine loads
    messages       pickled messages to send once connected; read anew whenever the file changes
    in_flight      number of requests; none is 0
    generated      number of tokens generated so far; none is 0
    received       number of prompt tokens whose KV came from elsewhere; none is 0
    restart        the engine core hangs up and comes anew, with nothing to say
    crash          end with exit code 7
    hang           answer nothing any more
    careless       leave the engine core behind at the end
    stubborn       take no notice of SIGTERM
    started.json   written: argv, environment, process ids
    heard          written: generations of the live documents that the core heard, a line each
    stopped        written when it stopped on request
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(os.environ["FAKE_VLLM"])
POLL_S = 0.01


def flag(name: str) -> str | None:
    return next((word.partition("=")[2] for word in sys.argv if word.startswith(f"{name}=")), None)


def number(name: str) -> float:
    file = HERE / name
    return float(file.read_text()) if file.exists() else 0.0


def core() -> None:
    """The engine core's process."""
    from flowprefill.server.vllm.channel import CoreChannel

    section = json.loads(flag("--additional-config") or "{}").get("flowprefill", {})

    def hear(message: object) -> None:
        with (HERE / "heard").open("a") as heard:
            heard.write(f"{message.live.generation}\n")  # type: ignore[attr-defined]

    channel = CoreChannel(section.get("channel"), hear)
    stamp = None
    while True:
        file = HERE / "messages"
        found = file.stat().st_mtime_ns if file.exists() else None
        if (HERE / "restart").exists():
            (HERE / "restart").unlink()
            channel.close()
            channel = CoreChannel(section.get("channel"), hear)
        if found is not None and found != stamp and not (HERE / "loading").exists():
            stamp = found
            for message in pickle.loads(file.read_bytes()):
                channel.send(message)
        time.sleep(POLL_S)


def main() -> int:
    (model,) = sys.argv[2:3]
    engine = subprocess.Popen([sys.executable, __file__, "core", *sys.argv[3:]])
    stop = threading.Event()

    def on_term(number: int, frame: object) -> None:
        if not (HERE / "stubborn").exists():
            stop.set()

    signal.signal(signal.SIGTERM, on_term)

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while (HERE / "hang").exists():
                time.sleep(POLL_S)
            if self.path == "/health":
                self.answer(503 if (HERE / "loading").exists() else 200, "")
            elif self.path == "/metrics":
                running, generated, received = map(number, ("in_flight", "generated", "received"))
                labels = f'{{engine="0",model_name="{model}"}}'
                self.answer(
                    200,
                    f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}\n"
                    f"vllm:num_requests_waiting{labels} 0.0\n"
                    f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 5.0\n'
                    f"vllm:generation_tokens_total{labels} {generated}\n"
                    f"vllm:external_prefix_cache_hits_total{labels} {received}\n",
                )
            else:
                self.answer(404, "")

        def answer(self, code: int, text: str) -> None:
            data = text.encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer((flag("--host") or "", int(flag("--port") or 0)), Api)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started = {
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "core": engine.pid,
        "keeper": os.getppid(),
    }
    (HERE / "started.tmp").write_text(json.dumps(started))
    (HERE / "started.tmp").rename(HERE / "started.json")
    while not stop.wait(POLL_S):
        if (HERE / "crash").exists():
            return 7  # its engine core stays, as one does whose API server dies
    (HERE / "stopped").touch()
    if not (HERE / "careless").exists():
        engine.kill()
        engine.wait()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "core":
        core()
    os._exit(main())
