"""`python -m kinetod.kineto_ipc.namespace_socket`: creates the poll socket in another network namespace, and ends.

Theory of operation
    A socket belongs to the network namespace in which it was created, wherever its descriptor goes. Only this
    short-lived process enters one: it checks that the given process still lives there, enters, binds the name, and
    passes the descriptor to its parent through the socket on its standard input. One packet reports the result: BOUND
    with a descriptor, or a text.
"""

import ctypes
import os
import socket
import sys
from pathlib import Path

from kinetod.base.libc import LIBC
from kinetod.kineto_ipc.poll_sockets import ABSTRACT_IN_PROC, NameTaken, bound_socket, holder
from kinetod.processes.identity import PROC, start_time_ns

BOUND = b"bound"
_CLONE_NEWNET = 0x40000000


def bound_in(pid: int, start: int, namespace: int, proc: Path = PROC) -> socket.socket:
    """Enters the namespace for good. start: start_time_ns of a machine booted at 0. Raises OSError, NameTaken."""
    place = os.open(proc / str(pid) / "ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if start_time_ns(pid, proc, boot_time_ns=0) != start or os.fstat(place).st_ino != namespace:
            raise ProcessLookupError("the process has ended, or has left its network namespace")
        if LIBC.setns(place, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"it cannot be entered: {os.strerror(number)}")
    finally:
        os.close(place)
    return bound_socket()


def main() -> int:
    """Arguments: pid, start and inode of the namespace."""
    pid, start, namespace = map(int, sys.argv[1:])
    with socket.socket(fileno=0) as parent:
        try:
            sock = bound_in(pid, start, namespace)
        except NameTaken:
            who = holder(ABSTRACT_IN_PROC, seen_by=str(pid)) or "another process"
            parent.send(f"{who} is using @dynolog there".encode())
        except OSError as exc:
            parent.send((exc.strerror or str(exc)).encode())
        else:
            socket.send_fds(parent, [BOUND], [sock.fileno()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
