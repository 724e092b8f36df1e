"""Forks a process for each session, confined to the session's folder, which runs a function of another package.

    python -m kinetod.sandbox.confined_sessions DESCRIPTOR MODULE:FUNCTION

Theory of operation
    The warm process has done the slow imports and never reads hostile data; it has one thread. Requests for sessions
    arrive over the socket of that descriptor (SOCK_SEQPACKET): {"folder", "memory_bytes", "cpu_s"} with one descriptor,
    over which the session talks to the requester. It forks; the child confines itself and calls the function with that
    descriptor. The answer is a pidfd of the child, to kill it, or no descriptor if it is gone. Without Landlock and
    seccomp there is no session. The children die with the warm process.
"""

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from kinetod.sandbox.confinement import Limits, close_descriptors, confine, die_with_parent, prepare

READY, ANSWER = b"ready", b"session"
MAX_ASKED_BYTES = 64 << 10
READABLE = (Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))  # DuckDB needs its limits to open a database
_STDOUT, _STDERR = 1, 2

Work = Callable[[int], None]


def main(arguments: list[str]) -> int:
    """Serves until the socket closes. arguments: the socket's descriptor, and the function."""
    descriptor, place = arguments
    module, _, name = place.partition(":")
    work: Work = getattr(importlib.import_module(module), name)
    prepare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requester handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps children that end
    with socket.socket(fileno=int(descriptor)) as control:
        control.send(READY)
        while True:
            asked, descriptors, _, _ = socket.recv_fds(control, MAX_ASKED_BYTES, 1)
            if not asked:
                return 0
            _begin(control, json.loads(asked), descriptors[0], work)


def _begin(control: socket.socket, session: dict[str, Any], descriptor: int, work: Work) -> None:
    pid = os.fork()
    if pid == 0:
        _child(session, descriptor, work)
    os.close(descriptor)
    try:
        child = os.pidfd_open(pid)
    except ProcessLookupError:
        control.send(ANSWER)
        return
    socket.send_fds(control, [ANSWER], [child])
    os.close(child)


def _child(session: dict[str, Any], descriptor: int, work: Work) -> NoReturn:
    status = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_descriptors((_STDOUT, _STDERR, descriptor))
        os.open(os.devnull, os.O_RDWR)  # takes the number of standard input
        limits = Limits(memory_bytes=session["memory_bytes"], cpu_s=session["cpu_s"], required=True)
        confine(Path(session["folder"]), limits, READABLE)
        os.dup2(0, _STDOUT)  # from here on it may be compromised, and must not write to the server's log
        os.dup2(0, _STDERR)
        work(descriptor)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it must not get back into the warm process's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
