"""Jobs for the workers: each is computed once, however many pages wait for it, and pages need not wait to its end.

Theory of operation
    A job is named by what it is of: the identity of the files, the views, and their options. Its result is remembered
    under that key, and its failure for a while, so that a page that is loaded again does not repeat it. The traces of
    one key go to the same worker, which has them open. A page waits for a moment; if there is no result by then it
    says so and is loaded again. At most MAX_WAITING jobs wait.
"""

import json
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

from kinetoctl.web.analyses.worker_process import AnalysisFailed, WorkerLimits, WorkerProcess

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
