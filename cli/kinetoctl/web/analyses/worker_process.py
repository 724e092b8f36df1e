"""A worker process from outside: started, asked, and killed if it takes too long. A new one follows."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kinetoctl.web.analyses import frames

_START_S = 120.0  # on a machine that is busy
# Arrow's own allocator gives memory back after each column: columns are read in half the time without it.
ARROW_ALLOCATOR = {"ARROW_DEFAULT_MEMORY_POOL": "system"}


class AnalysisFailed(Exception):
    """There is no result; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker may use: bytes of private memory, seconds for a job, and bytes of an answer."""

    memory_bytes: int = 4 << 30
    job_s: int = 60
    answer_bytes: int = frames.MAX_FRAME_BYTES


def answered(sock: socket.socket, job: dict[str, Any], limits: WorkerLimits, end: Callable[[], None]) -> Any:
    """The value of a job. end: called where the process is of no more use. Raises AnalysisFailed."""
    try:
        frames.send(sock, job)
        answer = json.loads(frames.receive(sock, limits.answer_bytes))
    except TimeoutError:
        end()
        raise AnalysisFailed(
            f"the analysis took longer than {limits.job_s} s and was ended; --worker-time sets the limit"
        ) from None
    except (EOFError, OSError, ValueError) as exc:
        end()
        raise AnalysisFailed(
            "the process of the analysis died: it may have needed more memory than there is; "
            "--worker-memory sets its limit"
        ) from exc
    if "failure" in answer:
        raise AnalysisFailed(answer["failure"])
    return answer["value"]


class WorkerProcess:
    """One process. Jobs wait for each other. Thread-safe."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process, if none is running, so that the first job need not wait for its imports."""
        with self._lock:
            self._started()

    def ask(self, job: dict[str, Any]) -> Any:
        """The value of a job. Raises AnalysisFailed."""
        with self._lock:
            return answered(self._started(), job, self._limits, self._end)

    def close(self) -> None:
        """Ends the process, also in the middle of a job. It does not start again."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._sock is not None:
            return self._sock
        self._end()
        if self._closed:
            raise AnalysisFailed("the server is ending")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kinetoctl.web.analyses.worker_main", str(theirs.fileno())),
                    *(str(self._limits.memory_bytes), str(self._limits.job_s)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **ARROW_ALLOCATOR},
            )
        ours.settimeout(_START_S)
        try:
            frames.receive(ours)
        except (EOFError, OSError) as exc:
            ours.close()
            self._end()
            raise AnalysisFailed("the process of the analysis did not start; the terminal may say why") from exc
        ours.settimeout(self._limits.job_s)
        self._sock = ours
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
