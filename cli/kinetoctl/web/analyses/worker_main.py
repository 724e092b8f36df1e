"""The worker process: opens traces, computes views and queries. `python -m kinetoctl.web.analyses.worker_main FD …`.

It answers one job after the other over a socket, keeps the last traces open, and ends with the server. The kernel holds
it to its memory and, if the server is gone, to its time.
"""

import json
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from kinetoctl.web.analyses import frames

if TYPE_CHECKING:
    from kinetoctl.web.analyses.trace_jobs import TraceJobs

READY = "ready"  # the first message: everything is imported
_GRACE_S = 10  # beyond the server's own limit


def main(arguments: list[str]) -> int:
    """Serves until the socket closes. arguments: descriptor of the socket, bytes of memory, seconds for a job."""
    descriptor, memory_bytes, limit_s = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which then closes the socket
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    from kinetoctl.web.analyses.trace_jobs import TraceJobs

    with socket.socket(fileno=descriptor) as sock:
        serve(sock, TraceJobs(), limit_s)
    return 0


def serve(sock: frames.Connection, jobs: "TraceJobs", limit_s: int | None) -> None:
    """Answers jobs until the socket closes. limit_s: for a job, after which the process ends itself; None: never."""
    frames.send(sock, READY)
    while True:
        try:
            job = json.loads(frames.receive(sock))
        except (EOFError, ConnectionResetError):
            return
        if limit_s is not None:
            signal.alarm(limit_s + _GRACE_S)  # this job's; the next one sets it anew
        frames.send(sock, _answer(jobs, job))
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
    except MemoryError:
        jobs.forget()
        return {"failure": "the analysis needs more memory than it may use; --worker-memory sets the limit"}
    except Exception as exc:  # noqa: BLE001 - of a view on a trace that nobody has seen before
        return {"failure": f"{type(exc).__name__}: {exc}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
