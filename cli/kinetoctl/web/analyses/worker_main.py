"""The worker process: opens traces, computes views and queries. `python -m kinetoctl.web.analyses.worker_main FD …`.

It answers one job after the other over a socket, keeps the last traces open, and ends with the server. The kernel holds
it to its memory and, if the server is gone, to its time.
"""

import json
import math
import os
import resource
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinetoctl.web.analyses.trace_jobs import TraceJobs

READY = "ready"  # the first message: everything is imported
_GRACE_S = 10  # beyond the server's own limit
_LENGTH_BYTES = 8
MAX_FRAME_BYTES = 256 << 20


class DescriptorSocket:
    """A socket that is used by read and write alone, where nothing else is allowed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def sendall(self, data: bytes) -> None:
        """Sends everything. Raises OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def recv_into(self, buffer: memoryview) -> int:
        """Receives some bytes; 0 at the end. Raises OSError."""
        return os.readv(self._descriptor, [buffer])


Connection = socket.socket | DescriptorSocket


def send(sock: Connection, value: Any) -> None:
    """Sends one value. Raises OSError."""
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    sock.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def receive(sock: Connection, most: int = MAX_FRAME_BYTES, *, until_s: float = math.inf) -> bytes:
    """The JSON text of the next value. until_s: monotonic time by which all of it must have come, also if it drips.

    Raises EOFError at the end, OSError, TimeoutError, ValueError if it is too large.
    """
    length = int.from_bytes(_exactly(sock, _LENGTH_BYTES, until_s), "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes is too large")
    return _exactly(sock, length, until_s)


def _exactly(sock: Connection, count: int, until_s: float) -> bytes:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        if time.monotonic() >= until_s:
            raise TimeoutError
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(content)


def main(arguments: list[str]) -> int:
    """Serves until the socket closes. arguments: descriptor of the socket, bytes of memory, seconds for a job."""
    descriptor, memory_bytes, limit_s = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which then closes the socket
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    from kineto_trace.base.without_pandas import go_without_pandas

    go_without_pandas()
    from kinetoctl.web.analyses.trace_jobs import TraceJobs

    with socket.socket(fileno=descriptor) as sock:
        serve(sock, TraceJobs(), limit_s)
    return 0


def serve(sock: Connection, jobs: "TraceJobs", limit_s: int | None) -> None:
    """Answers jobs until the socket closes. limit_s: for a job, after which the process ends itself; None: never."""
    send(sock, READY)
    while True:
        try:
            job = json.loads(receive(sock))
        except (EOFError, ConnectionResetError):
            return
        if limit_s is not None:
            signal.alarm(limit_s + _GRACE_S)  # this job's; the next one sets it anew
        send(sock, _answer(jobs, job))
        if limit_s is not None:
            signal.alarm(0)


def _answer(jobs: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job, or why there is none."""
    from kineto_trace.errors import TraceError

    from kinetoctl.errors import CliError

    try:
        return {"value": jobs.run(job)}
    except (CliError, TraceError) as exc:
        return {"failure": str(exc)}
    except MemoryError as exc:
        jobs.forget()
        said = str(exc) or "the analysis needs more memory than it is allowed to use"
        return {"failure": f"{said}; --worker-memory sets the limit"}
    except Exception as exc:  # noqa: BLE001 - of a view on a trace that nobody has seen before
        return {"failure": f"{type(exc).__name__}: {exc}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
