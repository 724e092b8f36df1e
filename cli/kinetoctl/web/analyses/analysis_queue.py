"""Jobs and the workers that do them: each is computed once, and pages need not wait to its end.

Theory of operation
    A job is named by what it is of: the identity of the files, the views, and their options. Its result is remembered
    under that key, and its failure for a while, so that a page that is loaded again does not repeat it. The traces of
    one key go to the same worker, which has them open. A page waits for a moment; if there is no result by then it
    says so and is loaded again. At most MAX_WAITING jobs wait.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from kineto_trace.base.own_processes import python

from kinetoctl.web.analyses import worker_main

# A worker process from outside: started, asked, and killed if it takes too long. A new one follows.
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
            f"the analysis{_of(job)} took longer than {limits.job_s} s and was stopped: choose one rank or step, run "
            "kinetoctl report, which has no limit, or raise --worker-time"
        ) from None
    except (EOFError, OSError, ValueError, TypeError, LookupError, RecursionError) as exc:  # it may be taken over
        end()
        raise AnalysisFailed(
            "the analysis process died or gave an invalid answer: it may have run out of memory; "
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
            raise AnalysisFailed("the server is shutting down")
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
            raise AnalysisFailed("the analysis process did not start; the terminal may show why") from exc
        ours.settimeout(self._limits.job_s)


WORKERS = 2
MAX_WAITING = 16
FAILURE_S = 20.0
MAX_BYTES = 256 << 20
MAX_ENTRIES = 500


class ResultCache:
    """Results by key, the least recently used of which go first. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._entries: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def find(self, key: str) -> Any:
        """The result, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def keep(self, key: str, value: Any, size: int) -> None:
        """Keeps a result of about `size` bytes, unless it is larger than everything together may be."""
        with self._lock:
            _, before = self._entries.pop(key, (None, 0))
            self._bytes -= before
            if size > self._max_bytes:
                return
            self._entries[key] = value, size
            self._bytes += size
            while self._bytes > self._max_bytes or len(self._entries) > MAX_ENTRIES:
                _, (_, gone) = self._entries.popitem(last=False)
                self._bytes -= gone


class Computing(Exception):
    """The result is not there yet."""


class TooBusy(Exception):
    """Too many results are waited for."""


class Analyses(Protocol):
    """What pages ask for results."""

    def result(self, of: str, job: dict[str, Any], *, wait_s: float) -> Any:
        """The value of a job on the files whose identity is `of`. Raises Computing, AnalysisFailed, TooBusy."""

    def fresh(self, of: str, job: dict[str, Any]) -> Any:
        """The value of a job that is not remembered, such as a file that is written. Raises AnalysisFailed."""


@dataclass(slots=True)
class _Failures:
    """What failed lately, so that a page that loads itself again shows it instead of computing it again."""

    clock: Callable[[], float]
    found: dict[str, tuple[float, str]] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Raises AnalysisFailed."""
        at, text = self.found.get(key, (float("-inf"), ""))
        if self.clock() - at < FAILURE_S:
            raise AnalysisFailed(text)

    def note(self, key: str, text: str) -> None:
        """Remembers a failure, and forgets old ones."""
        now = self.clock()
        self.found = {each: (at, what) for each, (at, what) in self.found.items() if now - at < FAILURE_S}
        self.found[key] = now, text


class AnalysisQueue:
    """The workers and what they have computed. A context manager; thread-safe."""

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        workers: Sequence[Any] | None = None,
        cache: ResultCache | None = None,
        most_each: int = MAX_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """workers: instead of processes; each has `ask`, `start` and `close`. most_each: jobs of one `folder`."""
        self._workers = workers or [WorkerProcess(limits) for _ in range(WORKERS)]
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix="analysis") for _ in self._workers]
        self._cache = cache or ResultCache()
        self._lock = threading.Lock()
        self._running: dict[str, Future[Any]] = {}
        self._most_each = most_each
        self._of_folder = Counter[str]()
        self._failures = _Failures(clock)

    def __enter__(self) -> "AnalysisQueue":
        for pool, worker in zip(self._pools, self._workers, strict=True):
            pool.submit(worker.start)
        return self

    def __exit__(self, *_error: object) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def result(self, of: str, job: dict[str, Any], *, wait_s: float) -> Any:
        """The value of a job on the files whose identity is `of`.

        Raises Computing if it takes longer than wait_s, AnalysisFailed, TooBusy.
        """
        key = json.dumps([of, job], sort_keys=True)
        found = self._cache.find(key)
        if found is not None:
            return found
        with self._lock:
            self._failures.check(key)
            future = self._running.get(key)
            if future is None:
                folder = job.get("folder", "")
                if len(self._running) >= MAX_WAITING or self._of_folder[folder] >= self._most_each:
                    raise TooBusy
                self._of_folder[folder] += 1
                place = self._place(of)
                future = self._running[key] = self._pools[place].submit(self._run, place, key, job)
        try:
            return future.result(wait_s)
        except FutureTimeout:
            raise Computing from None

    def fresh(self, of: str, job: dict[str, Any]) -> Any:
        """The value of a job that is not remembered, such as a file that is written. Raises AnalysisFailed."""
        return self._workers[self._place(of)].ask(job)

    def _place(self, of: str) -> int:
        """The worker for these files."""
        return zlib.crc32(of.encode()) % len(self._workers)

    def _run(self, place: int, key: str, job: dict[str, Any]) -> Any:
        try:
            value = self._workers[place].ask(job)
            self._cache.keep(key, value, len(json.dumps(value)))
        except AnalysisFailed as exc:
            with self._lock:
                self._failures.note(key, str(exc))
            raise
        finally:
            with self._lock:
                self._running.pop(key, None)
                self._of_folder -= Counter([job.get("folder", "")])  # those that reach 0 go
        return value
