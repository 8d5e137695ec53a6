"""A tiny pod for tests of the local node: listens on the ports it is told, and behaves as its switches say.

`python standin_pod.py [serve|proxy] --port N --admin-port N ... ` where the folder in $SWITCHES may hold files that
change the behaviour while it runs: `<role>.unready`, `<role>.unhealthy`, `<role>.crash` (exit 3 at start),
`<role>.stubborn` (ignore SIGTERM), `<role>.child` (have a child process), `<role>.daemon` (have
one that left the process group). GET / on the API port answers with what the pod knows of itself, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?")
    parser.add_argument("--role", default="proxy")
    for flag in ("config", "live", "endpoints", "host"):
        parser.add_argument(f"--{flag}")
    for flag in ("port", "admin-port", "kv-port"):
        parser.add_argument(f"--{flag}", type=int)
    args = parser.parse_args()
    switches = Path(os.environ["SWITCHES"])

    def switched(what: str) -> bool:
        return (switches / f"{args.role}.{what}").exists()

    _say(f"{args.role} starts as {os.environ['POD_NAME']}")
    if switched("crash"):
        _say("this pod crashes on purpose")
        return 3
    # A process that a group kill must take along.
    child = None
    if switched("child") or switched("daemon"):
        program = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(program, start_new_session=switched("daemon"))
    stop = threading.Event()

    def on_term(number: int, frame: object) -> None:
        _say("got SIGTERM")
        if not switched("stubborn"):
            stop.set()

    signal.signal(signal.SIGTERM, on_term)

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            live = Path(args.live) / "live.json"
            body = {
                "role": args.role,
                "pod": os.environ["POD_NAME"],
                "pid": os.getpid(),
                "child": None if child is None else child.pid,
                "config": json.loads(Path(args.config).read_text()),
                "live": json.loads(live.read_text()),
                "argv": sys.argv[1:],
            }
            _answer(self, 200, body)

        def log_message(self, *args: object) -> None:
            return

    class Admin(Api):
        def do_GET(self) -> None:
            broken = {"/ready": switched("unready"), "/health": switched("unhealthy")}
            live = json.loads((Path(args.live) / "live.json").read_text())
            body = {"generation": live["generation"]}
            _answer(self, 503 if broken.get(self.path, False) else 200, body)

    for handler, port in ((Api, args.port), (Admin, args.admin_port)):
        server = ThreadingHTTPServer((args.host, port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    stop.wait()
    _say("ends")
    return 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the node may be gone
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _answer(handler: BaseHTTPRequestHandler, code: int, body: object) -> None:
    data = json.dumps(body).encode()
    handler.send_response(code)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


if __name__ == "__main__":
    sys.exit(main())
