"""Workers that a trace cannot take the server through: each serves one user at a time, in the daemon's own sandbox.

Theory of operation
    Traces are hostile, and whoever took over a worker with the rights of this server could ask the daemon in the name
    of every user. So a warm process (`kinetod.sandbox.confined_sessions`, started by its name), which has imported the
    library of traces (`confined_work`) and never looks at one, forks a process for each user, which reaches the code
    and that user's folder and nothing else: no socket, no other process, no other folder. When the next job is another
    user's, the process is ended and another one takes its place.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from kinetoctl.web.analyses import frames
from kinetoctl.web.analyses.worker_process import ARROW_ALLOCATOR, AnalysisFailed, WorkerLimits, answered

_SANDBOX = "kinetod.sandbox.confined_sessions"
_WORK = "kinetoctl.web.shared.confined_work:serve_confined"
# A fork must leave nothing locked, and Arrow's allocator has a thread of its own.
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_START_S = 120.0
_CPU_S = 3600  # of one user's process, then it is replaced


class WarmProcess:
    """The process that forks. Thread-safe."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts it, if it is not running. Raises AnalysisFailed."""
        with self._lock:
            self._started()

    def session(self, folder: str) -> tuple[socket.socket, int]:
        """A new worker for this folder: the socket to it, and its pidfd. Raises AnalysisFailed."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                child = self._forked(folder, theirs)
            ours.settimeout(_START_S)
            try:
                frames.receive(ours)
            except (EOFError, OSError):
                os.close(child)
                raise AnalysisFailed("the process of the analysis could not be confined; the log says why") from None
            ours.settimeout(self._limits.job_s)
        except BaseException:
            ours.close()
            raise
        return ours, child

    def close(self) -> None:
        """Ends it, and with it every worker. It does not start again."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it goes on, and lets the lock go
        with self._lock:
            self._end()

    def _forked(self, folder: str, theirs: socket.socket) -> int:
        """The pidfd of the new process. Raises AnalysisFailed."""
        control = self._started()
        asked = {"folder": folder, "memory_bytes": self._limits.memory_bytes, "cpu_s": _CPU_S}
        try:
            socket.send_fds(control, [json.dumps(asked).encode()], [theirs.fileno()])
            answer, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        except OSError as exc:
            raise AnalysisFailed("the process that starts analyses does not answer") from exc
        if not answer or not descriptors:
            raise AnalysisFailed("the process of the analysis ended at once; the server's log says why")
        return descriptors[0]

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return self._control
        self._end()
        if self._closed:
            raise AnalysisFailed("the server is ending")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _SANDBOX, str(theirs.fileno()), _WORK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ONE_THREAD, **ARROW_ALLOCATOR},
            )
        ours.settimeout(_START_S)
        try:
            ready = ours.recv(64)
        except OSError:
            ready = b""
        if not ready:
            ours.close()
            self._end()
            raise AnalysisFailed("the process that starts analyses did not start; the server's log says why")
        self._control = ours
        return ours

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None


class ConfinedWorker:
    """One worker at a time. A job names its user's folder as `folder`. Thread-safe."""

    def __init__(self, warm: WarmProcess, limits: WorkerLimits) -> None:
        self._warm = warm
        self._limits = limits
        self._lock = threading.Lock()
        self._folder = ""
        self._sock: socket.socket | None = None
        self._child: int | None = None

    def start(self) -> None:
        """Starts the warm process."""
        with suppress(AnalysisFailed):  # the first job will say it
            self._warm.start()

    def ask(self, job: dict[str, Any]) -> Any:
        """The value of a job. Raises AnalysisFailed."""
        asked = {name: value for name, value in job.items() if name != "folder"}
        with self._lock:
            return answered(self._session(job["folder"]), asked, self._limits, self._end)

    def close(self) -> None:
        """Ends the worker, also in the middle of a job."""
        self._kill()
        with self._lock:
            self._end()

    def _session(self, folder: str) -> socket.socket:
        if self._sock is not None and self._folder == folder:
            return self._sock
        self._end()
        self._sock, self._child = self._warm.session(folder)
        self._folder = folder
        return self._sock

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(child, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        if self._sock is not None:
            self._sock.close()
        if self._child is not None:
            os.close(self._child)
        self._sock = self._child = None
