"""Runs a program that must not outlive the process which started it: `python -m flowprefill.server.vllm.keeper FOLDER PROGRAM ...`.

The program leads a process group of its own, in which all that it starts stays. SIGTERM and SIGINT go on to the program,
SIGUSR1 kills the group, and so does the program's end: no engine core outlives its API server. When standard input ends, the
process that held its other end is gone, by whatever death: the program is asked to stop, and soon killed, and the folder
that is that process's own is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

ORPHAN_S = 3.0
"""How long a program may take to stop once nobody needs it."""

NOT_FOUND = 127


def main(folder: str, argv: list[str]) -> int:
    """Run the program; its exit code, 128 plus the signal's number when a signal ended it."""
    handled = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # what comes before there is a program waits for it
    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, handled),  # no other thread yet
        )
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return NOT_FOUND
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: program.send_signal(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: _kill_group(program))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    orphaned = threading.Event()
    threading.Thread(target=_outlived, args=(program, orphaned), daemon=True).start()
    code = program.wait()
    _kill_group(program)
    if orphaned.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _outlived(program: subprocess.Popen[bytes], orphaned: threading.Event) -> None:
    """Wait for the end of standard input, then for the program, not for long."""
    while os.read(0, 4096):
        continue
    orphaned.set()
    program.terminate()
    try:
        program.wait(ORPHAN_S)
    except subprocess.TimeoutExpired:
        sys.stderr.write("the process that started this one is gone, and the program does not stop: killed\n")
        _kill_group(program)


def _kill_group(program: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


if __name__ == "__main__":
    # Past the interpreter's own end, which would wait for the thread that reads standard input.
    code = main(sys.argv[1], sys.argv[2:])
    sys.stderr.flush()
    os._exit(code)
