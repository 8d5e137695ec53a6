"""Runs one command in a session of its own and ends it when the supervisor goes away.

Started as `python -I -S shim.py GRACE_S ARGV...` with standard library only, so that it costs a few MiB. Standard
input is a pipe from the supervisor: the byte T asks for SIGTERM to the command, K for SIGKILL to its whole group;
the end of the pipe means that the supervisor is gone, even by SIGKILL, and the command is stopped: SIGTERM,
`GRACE_S` seconds, SIGKILL. On Linux the command also dies with this shim (PR_SET_PDEATHSIG).

The first line of output is the command's process id. When the command ends, whatever it left is killed, and the shim ends the same way: with the command's
exit code, or 128 + signal. 127 says that the command could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _exec(argv: list[str], go: int) -> None:
    """In the child: become the command once the shim says go. Returns only by ending the process."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.read(go, 1) != b"g":  # the shim died before the kernel was told
            os._exit(127)
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        # What was inherited is the supervisor's lock; the command must not hold it.
        for descriptor in [int(name) for name in os.listdir("/dev/fd")]:
            if descriptor > 2:
                with contextlib.suppress(OSError):
                    os.set_inheritable(descriptor, False)
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]} could not be started: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _serve(pid: int, grace_s: float) -> int:
    """Obey the control pipe until the command ends; its wait status."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watched = [0, woken]
    kill_at: float | None = None
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return status
        if ended:  # adopted
            continue
        timeout = None if kill_at is None else max(kill_at - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], timeout)
        if woken in ready:
            os.read(woken, 512)
        if 0 in ready:
            command = os.read(0, 1)
            if command == b"K":
                _signal_group(pid, signal.SIGKILL)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            if not command:
                watched.remove(0)
                kill_at = time.monotonic() + grace_s
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal_group(pid, signal.SIGKILL)
            kill_at = None


def _kill_adopted() -> None:
    """Kill what left the command's group: on Linux the shim has adopted it."""
    listing = f"/proc/self/task/{os.getpid()}/children"
    while os.path.exists(listing):
        with open(listing) as file:
            children = file.read().split()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


def main() -> None:
    grace_s, argv = float(sys.argv[1]), sys.argv[2:]
    # A terminal's Ctrl-C and a broken log pipe concern the supervisor; it then tells this shim.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    go, say_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(say_go)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        _exec(argv, go)
    os.write(1, f"{pid}\n".encode())
    os.write(say_go, b"g")
    os.close(go)
    status = _serve(pid, grace_s)
    _signal_group(pid, signal.SIGKILL)
    _kill_adopted()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
