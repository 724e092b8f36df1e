"""Reads the GPUs for the daemon: asks the reader process for a snapshot, with a deadline.

Theory of operation
    `read` blocks for `deadline_s` at most, whatever the driver does; it is called in threads. Concurrent callers wait
    for the same answer, and a snapshot younger than `max_age_s` is shared by all. A late process is left alone, since
    opening a driver may take many seconds: the next caller takes its answer. Only after KILL_S is it killed and a new
    one started. There is one question at a time; a caller with another question waits for the answer to the first.
"""

import asyncio
import contextlib
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuQuestion, GpuState, LibraryState, Snapshot, VendorLibrary
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.gpus.reader_process")
NO_ACTIVITY = "--no-activity"  # option of that command
DEADLINE_S = 1.5
MAX_AGE_S = 1.0
KILL_S = 60.0
RESTART_S = 5.0  # after a crash
MAX_ANSWER_BYTES = 4 << 20
_EXIT_S = 1.0
NAMES = ("nvml", "amdsmi", "sysman", "drm")


class _Crashed(Exception):
    pass


class GpuReader:
    """Snapshots of this host's GPUs. Thread-safe. activity: whether to count the activity of their units."""

    def __init__(
        self,
        *,
        activity: bool = True,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = tuple(command) if activity else (*command, NO_ACTIVITY)
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: GpuQuestion | None = None  # the question being answered
        self._asked_at = float("-inf")
        self._answer = b""
        # the latest for each question, and its time
        self._snapshots = dict.fromkeys(GpuQuestion, (Snapshot(), float("-inf")))
        self._crashed_at = float("-inf")
        self._crash = ""
        self._states: dict[str, VendorLibrary] = {}
        self._closed = False

    def pids(self) -> set[int]:
        """The pid of the reader process, if it is running."""
        process = self._process
        return set() if process is None or process.returncode is not None else {process.pid}

    def latest(self, max_age_s: float = float("inf"), question: GpuQuestion = GpuQuestion.EVERYTHING) -> Snapshot:
        """The last snapshot, without a new reading; an empty one if it is older than `max_age_s`."""
        snapshot, read_at = self._snapshots[question]
        return snapshot if self._clock() - read_at <= max_age_s else Snapshot()

    def read(
        self,
        *,
        max_age_s: float = MAX_AGE_S,
        deadline_s: float = DEADLINE_S,
        question: GpuQuestion = GpuQuestion.EVERYTHING,
    ) -> Snapshot:
        """The latest snapshot, at most `max_age_s` old; on a timeout an empty one with the reason."""
        end = self._clock() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):
            return _nothing(LibraryState.LATE, _late(deadline_s))
        try:
            if (found := self.latest(max_age_s, question)).time_ns:
                return found
            found = self._ask(question, end, deadline_s)
            self._note(found)
            return found
        finally:
            self._lock.release()

    def _ask(self, question: GpuQuestion, end: float, deadline_s: float) -> Snapshot:
        now = self._clock()
        if self._closed:
            return _nothing(LibraryState.FAILED, "the daemon is stopping")
        if now - self._crashed_at < RESTART_S:
            return _nothing(LibraryState.FAILED, self._crash)
        if self._asked is not None and now - self._asked_at > KILL_S:
            self._end()
        try:
            while (answered := self._wait_for_answer(question, end)) not in (question, GpuQuestion.EVERYTHING):
                if answered is None:
                    return _nothing(LibraryState.LATE, _late(deadline_s))
        except _Crashed as exc:
            self._crashed_at, self._crash = self._clock(), str(exc)
            return _nothing(LibraryState.FAILED, self._crash)
        return self._snapshots[question][0]

    def _wait_for_answer(self, question: GpuQuestion, end: float) -> GpuQuestion | None:
        """Asks, unless an answer is still outstanding, and returns the question that was answered. None if the answer
        does not come in time. Raises _Crashed.
        """
        for _ in range(2):  # an idle process may end just now
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                if self._asked is None:
                    os.write(process.stdin.fileno(), question.encode())
                    self._asked, self._asked_at = question, self._clock()
                while b"\n" not in self._answer:
                    if not _readable(process.stdout.fileno(), end - self._clock()):
                        return None
                    part = os.read(process.stdout.fileno(), 1 << 16)
                    self._answer += part
                    if not part or len(self._answer) > MAX_ANSWER_BYTES:
                        raise BrokenPipeError
                return self._take(self._asked)
            except BrokenPipeError:
                if how := self._end(_EXIT_S):
                    raise _Crashed(
                        f"the process that reads the GPUs failed ({how}); the daemon's log has the details"
                    ) from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                self._end()
                raise _Crashed(f"the process that reads the GPUs sent an invalid answer: {exc}") from exc
        raise _Crashed("the process that reads the GPUs exits immediately")

    def _take(self, asked: GpuQuestion) -> GpuQuestion:
        """Reads an answer. Raises msgspec.DecodeError, UnicodeDecodeError, RecursionError."""
        read = msgspec.json.decode(self._answer, type=Snapshot), self._clock()
        self._answer, self._asked = b"", None
        self._snapshots |= {asked: read, GpuQuestion.PROCESSES: read}  # EVERYTHING includes the processes
        return asked

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
                )
            except OSError as exc:
                raise _Crashed(f"the process that reads the GPUs cannot be started: {exc.strerror}") from exc
        return self._process

    def _end(self, patience_s: float = 0.0) -> str:
        """Ends the process, giving it `patience_s` to end by itself; returns the reason if it failed, otherwise ""."""
        process, self._process = self._process, None
        self._answer, self._asked = b"", None
        if process is None:
            return ""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(patience_s)
            return f"exit status {status}" if status else ""
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver, where no signal reaches it
            process.wait(_EXIT_S)
        return "killed"

    def _note(self, found: Snapshot) -> None:
        """Logs changes."""
        for library in found.libraries:
            before = self._states.get(library.name)
            if before is None or before.state != library.state:
                level = logging.INFO if library.state in (LibraryState.OK, LibraryState.ABSENT) else logging.WARNING
                log.log(level, "reading GPUs through %s: %s", library.name, library.detail or library.state.value)
            self._states[library.name] = library

    def close(self) -> None:
        """Ends the process. Waits at most as long as a reading may take."""
        self._closed = True
        if self._lock.acquire(timeout=2 * DEADLINE_S):
            self._end()
            self._lock.release()


def _readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read within that time; unlike select, for any descriptor."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _late(deadline_s: float) -> str:
    return clean(f"the driver did not answer within {deadline_s:g} s", 200)


def _nothing(state: LibraryState, detail: str) -> Snapshot:
    return Snapshot(libraries=tuple(VendorLibrary(name=name, state=state, detail=detail) for name in NAMES))


# Finds which processes hold a context on which GPU, through the vendors' libraries. Used on the event loop. A capture
# waits for a fresh reading. Lists are requested often and must be quick: they use a recent reading and start a new one
# in the background; they wait only if it is too old. If the driver is late, a minute-old reading is better than
# nothing: processes keep their contexts for long.
FRESH_S = 1.0
LATELY_S = 5.0
OLD_S = 60.0
HOLDERS_DEADLINE_S = 3.0  # opening the driver takes about a second
LIST_DEADLINE_S = 1.5

Held = Mapping[int, frozenset[int]]  # pid -> GPUs: the N of /dev/nvidiaN; others as numbered by drm_gpus


class ContextHolders:
    """Queries the reader, which is shared by everybody who reads GPUs."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader
        self._reading: asyncio.Task[Snapshot] | None = None

    @property
    def has_gpus(self) -> bool:
        """Whether the last reading found any; the daemon reads at its start."""
        return bool(self._latest(float("inf")).gpus)

    async def now(self) -> Held:
        """The holders as of at most FRESH_S ago, if the driver answers in time."""
        return held(await self._read(FRESH_S, HOLDERS_DEADLINE_S))

    async def lately(self) -> Held:
        """The holders as of at most LATELY_S ago."""
        latest = self._latest(LATELY_S)
        if not latest.time_ns:
            return held(await self._read(LATELY_S, LIST_DEADLINE_S))
        if not self._latest(FRESH_S).time_ns and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(FRESH_S, LIST_DEADLINE_S), name="GPUs are read again")
        return held(latest)

    async def _read(self, max_age_s: float, deadline_s: float) -> Snapshot:
        question = GpuQuestion.PROCESSES
        found = await asyncio.to_thread(
            lambda: self._reader.read(max_age_s=max_age_s, deadline_s=deadline_s, question=question)
        )
        return found if found.time_ns else self._latest(OLD_S)

    def _latest(self, max_age_s: float) -> Snapshot:
        return self._reader.latest(max_age_s, GpuQuestion.PROCESSES)


def held(snapshot: Snapshot) -> Held:
    """The processes with a context on a GPU of the snapshot."""
    found: dict[int, frozenset[int]] = {}
    for gpu in snapshot.gpus:
        for process in gpu.processes:
            found[process.pid] = found.get(process.pid, frozenset()) | {gpu_number(gpu)}
    return found


def gpu_number(gpu: GpuState) -> int:
    """As `Held` has it."""
    minor = gpu.device.removeprefix("nvidia")
    return int(minor) if minor.isdecimal() else gpu.index
