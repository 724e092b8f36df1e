"""A worker process from outside: started, asked, and killed if it takes too long. A new one follows."""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kineto_trace.base.own_processes import python

from kinetoctl.web.analyses import worker_main

_WORKER = "kinetoctl.web.analyses.worker_main"
START_S = 120.0  # on a machine that is busy
# Arrow's own allocator gives memory back after each column: columns are read in half the time without it.
ARROW_ALLOCATOR = {"ARROW_DEFAULT_MEMORY_POOL": "system"}


class AnalysisFailed(Exception):
    """There is no result; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker may use: bytes of private memory, seconds for a job, and bytes of an answer."""

    memory_bytes: int = 4 << 30
    job_s: int = 60
    answer_bytes: int = worker_main.MAX_FRAME_BYTES


def answered(sock: socket.socket, job: dict[str, Any], limits: WorkerLimits, end: Callable[[], None]) -> Any:
    """The value of a job. end: called where the process is of no more use. Raises AnalysisFailed."""
    try:
        worker_main.send(sock, job)
        answer = json.loads(worker_main.receive(sock, limits.answer_bytes, until_s=time.monotonic() + limits.job_s))
        if "failure" not in answer:
            return answer["value"]
        failure = str(answer["failure"])
    except TimeoutError:
        end()
        raise AnalysisFailed(
            f"the analysis{_of(job)} took longer than {limits.job_s} s and was ended: choose one rank or step, run "
            "kinetoctl report, which has no limit, or raise --worker-time"
        ) from None
    except (EOFError, OSError, ValueError, TypeError, LookupError, RecursionError) as exc:  # it may be taken over
        end()
        raise AnalysisFailed(
            "the process of the analysis died, or its answer is none: it may have needed more memory than there is; "
            "--worker-memory sets its limit"
        ) from exc
    raise AnalysisFailed(failure)


def _of(job: dict[str, Any]) -> str:
    """The traces of a job, by the names of their files."""
    names = [Path(path).name for path in job.get("paths", ())]
    return f" of {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}" if names else ""


class SocketProcess(ABC):
    """A process that serves the other end of a socket, started on its first use. Thread-safe."""

    _kind = socket.SOCK_STREAM
    _environ: Callable[[], Mapping[str, str]] = staticmethod(lambda: os.environ)

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process, if none is running, so that the first job need not wait for it. Raises AnalysisFailed."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """Ends the process, also in the middle of a job. It does not start again."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it goes on, and lets the lock go
        with self._lock:
            self._end()

    @abstractmethod
    def _command(self, theirs: int) -> tuple[str, ...]:
        """What is started, with the descriptor of its end of the socket."""

    @abstractmethod
    def _wait_until_ready(self, ours: socket.socket) -> None:
        """Raises AnalysisFailed if the process does not serve."""

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._sock is not None:
            return self._sock
        self._end()
        if self._closed:
            raise AnalysisFailed("the server is ending")
        ours, theirs = socket.socketpair(socket.AF_UNIX, self._kind)
        with theirs:
            self._process = subprocess.Popen(
                self._command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**self._environ(), **ARROW_ALLOCATOR},
            )
        self._sock = ours
        ours.settimeout(START_S)
        try:
            self._wait_until_ready(ours)
        except AnalysisFailed:
            self._end()
            raise
        return ours

    def _end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None


class WorkerProcess(SocketProcess):
    """One process. Jobs wait for each other."""

    def ask(self, job: dict[str, Any]) -> Any:
        """The value of a job. Raises AnalysisFailed."""
        with self._lock:
            return answered(self._started(), job, self._limits, self._end)

    def _command(self, theirs: int) -> tuple[str, ...]:
        return python(_WORKER, *map(str, (theirs, self._limits.memory_bytes, self._limits.job_s)))

    def _wait_until_ready(self, ours: socket.socket) -> None:
        try:
            worker_main.receive(ours)
        except (EOFError, OSError) as exc:
            raise AnalysisFailed("the process of the analysis did not start; the terminal may say why") from exc
        ours.settimeout(self._limits.job_s)
