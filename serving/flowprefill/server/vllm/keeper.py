"""Runs a program that must not outlive the process which started it: `python -m flowprefill.server.vllm.keeper PROGRAM ...`.

It leads a process group in which the program and all that it starts are. SIGTERM and SIGINT go on to the program. When
standard input ends, the process that held its other end is gone, by whatever death: the program is asked to stop, and soon
the whole group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

ORPHAN_S = 10.0
"""How long a program may take to stop once nobody needs it."""

NOT_FOUND = 127


def main(argv: list[str]) -> int:
    """Run the program; its exit code, 128 plus the signal's number when a signal ended it."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return NOT_FOUND
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: program.send_signal(number))
    for early in asked:
        program.send_signal(early)
    threading.Thread(target=_outlived, args=(program,), daemon=True).start()
    code = program.wait()
    return code if code >= 0 else 128 - code


def _outlived(program: subprocess.Popen[bytes]) -> None:
    """Wait for the end of standard input, then for the program, not for long, and end everything."""
    while os.read(0, 4096):
        continue
    program.terminate()
    try:
        program.wait(ORPHAN_S)
    except subprocess.TimeoutExpired:
        sys.stderr.write("the process that started this one is gone, and the program does not stop: killed\n")
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    # Past the interpreter's own end, which would wait for the thread that reads standard input.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
