"""A pool of warm decode processes: started ahead of time, given a deadline, replaced when they die.

Theory of operation
    A trace may be anything that a target sent, and its decoder may crash, hang or be compromised: that must affect
    neither the daemon nor another capture. So each job is confined to its own folder (`sandbox`), and a folder that has
    crashed its decoder, or the daemon, MAX_TRIES times is not tried again, however often the daemon starts.

    RLIMIT_FSIZE limits one file, and a decoder may create many. So every WATCH_S the target's folder is scanned,
    without its raw records. A decoder is killed when its output exceeds any trace of that many records, or the number
    of files of any trace, or when it has written much and the disk comes close to its reserve, before other captures
    are ended for that. Files that it has removed but keeps open are not visible here.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.atomic_files import is_full, write_atomically
from kineto_trace.base.own_processes import safe_environment
from kineto_trace.base.quantities import format_duration, format_size

from kinetod.base import metrics
from kinetod.base.errors import VerdictReason
from kinetod.base.fair_slots import FairSlots
from kinetod.base.safe_text import clean, clean_code
from kinetod.sandbox.confinement import MAX_ANSWER_BYTES, most_output_bytes
from kinetod.supervise import child
from kinetod.supervise.child import Crashed, TooLate, WarmChild

log = logging.getLogger(__name__)

WATCH_S = 0.5
MAX_FILES = 4096  # a trace has about 50, and some attachments of a rank
_RAW = "raw"
_BLOCK_BYTES = 512  # of st_blocks, on all file systems
_MUCH_BYTES = 256 << 20  # a decoder that has written less is not what fills the disk
MAX_TRIES = 2
_TRIES_SUFFIX = ".tries"
COMMAND = child.python("kinetod.captures.result.decode_worker")
FATAL_ROUNDS = 3
SPARE_KEPT_S = 600.0
MAX_ANSWER_CHARS = 1000
MAX_ANSWERS_WAITING = 16
ANSWER_NS = 60 * 10**9  # for one; a second of processor time per million events
RAW_KEPT = "the raw records are kept in"  # part of a reason: the folder stays


class Overrun(Exception):
    """A decoder wrote too much. code: of the verdict."""

    def __init__(self, code: VerdictReason, text: str) -> None:
        super().__init__(text)
        self.code = code


class OutputWatch:
    """Watches the output of one decode. room: free bytes of the disk beyond its reserve."""

    def __init__(self, folder: Path, room: Callable[[], int]) -> None:
        self._folder = folder
        self._room = room
        self._most = 0
        self.bytes = 0

    def look(self) -> None:
        """Checks the folder. Blocking. Raises Overrun, OSError."""
        self._most = self._most or most_output_bytes(self._folder)
        files, self.bytes = measured(self._folder)
        if files > MAX_FILES:
            text = f"the decoder was killed: it created more than {MAX_FILES} files"
            raise Overrun(VerdictReason.DECODE_FAILED, text)
        if self.bytes > self._most:
            text = f"the decoder was killed: it wrote {format_size(self.bytes)}, more than these records can produce"
            raise Overrun(VerdictReason.DECODE_FAILED, text)
        if self.bytes > _MUCH_BYTES and self._room() <= 0:
            text = (
                f"the decoder was killed: it had written {format_size(self.bytes)} when the disk came close to its "
                "reserve (store.min_free_bytes, store.start_free_bytes)"
            )
            raise Overrun(VerdictReason.DISK_FULL, text)


def measured(folder: Path) -> tuple[int, int]:
    """The number of files and folders, and their bytes on disk; stops counting at MAX_FILES."""
    files = size = 0
    waiting = [str(folder)]
    while waiting and files <= MAX_FILES:
        top = waiting.pop()
        try:
            with os.scandir(top) as entries:
                for entry in entries:
                    if top == str(folder) and entry.name == _RAW:
                        continue
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if files > MAX_FILES:
                        break
        except OSError:  # removed in between, or a path that is too long, whose parent folders are counted
            continue
    return files, size


# Counts unfinished attempts at decoding a folder, in a file FOLDER.tries beside it, which its decoder cannot reach. The
# file is written before each try, so that a try that kills the daemon counts as well; it is removed once there is an
# answer.
def begin_try(folder: Path) -> bool:
    """Counts one more try and returns whether it is allowed. Raises OSError."""
    count = _count(folder)
    if count >= MAX_TRIES:
        return False
    write_atomically(_file(folder), b"%d" % (count + 1))
    return True


def take_back_try(folder: Path) -> None:
    """Takes the last try back."""
    with contextlib.suppress(OSError):
        write_atomically(_file(folder), b"%d" % max(0, _count(folder) - 1))


def forget_tries(folder: Path) -> None:
    """Forgets the tries of a folder that was decoded or refused."""
    with contextlib.suppress(OSError):
        _file(folder).unlink(missing_ok=True)


def _count(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(_file(folder), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return int(file.read(8))
    return 0


def _file(folder: Path) -> Path:
    return folder.with_name(folder.name + _TRIES_SUFFIX)


class DecodeError(Exception):
    """A target's records could not be decoded."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a decoder. required: whether a decoder that cannot be confined as documented must not run."""

    memory_bytes: int = 1 << 30
    required: bool = False


class _Worker(WarmChild):
    """One process. Used by one job at a time."""

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_Worker":
        """Starts a worker. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_ANSWER_BYTES, env=safe_environment()
        )
        return cls(process, log, "decode worker")

    async def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one job and returns its answer. Raises Crashed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            await self.process.stdin.drain()
            answer = json.loads(await self.process.stdout.readline())
        except (OSError, ValueError, RecursionError) as exc:
            raise Crashed(str(exc)) from exc
        if not isinstance(answer, dict) or answer.get("id") != job["id"]:
            raise Crashed("it sent an invalid answer")
        return answer


class WorkerPool:
    """Jobs wait for a free worker, in turns by user (`fair_slots`); `count` workers are kept when idle.

    The worker of the spare turn is kept for SPARE_KEPT_S after its last use: starting one takes longer than most jobs,
    and the holder of the spare turn would wait for it.
    """

    def __init__(
        self,
        count: int,
        *,
        command: Sequence[str] = COMMAND,
        bounds: Callable[[], Bounds] = Bounds,
        room: Callable[[], int] = lambda: 1 << 62,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """room: free bytes of the disk beyond its reserve; called in threads."""
        self._count = count
        self._room = room
        self._clock = clock
        self._spare_used_at = float("-inf")
        self._outputs: dict[Path, OutputWatch] = {}
        self._command = command
        self._bounds = bounds
        self._idle: list[_Worker] = []
        self._slots = FairSlots(count, spare=1)
        self._jobs = 0
        self._busy = 0
        self._answering = asyncio.Lock()
        self._answers_waiting = 0
        self._fatal_rounds = 0  # consecutive rounds in which all workers were dead

    def pids(self) -> set[int]:
        """The pids of idle workers."""
        return {worker.process.pid for worker in self._idle}

    def written(self, folder: Path) -> int:
        """Bytes that running decoders have written below a folder. From any thread."""
        return sum(output.bytes for path, output in list(self._outputs.items()) if path.is_relative_to(folder))

    async def start(self) -> None:
        """Warms all workers up."""
        self._idle = list(await asyncio.gather(*(_Worker.start(self._command) for _ in range(self._count))))

    async def tend(self) -> bool:
        """Replaces workers that have died, and ends the spare one in time.

        False if none can be started, or if all of them die again and again.
        """
        dead = [worker for worker in self._idle if worker.process.returncode is not None]
        # at once: jobs use the list in the meantime
        self._idle = [worker for worker in self._idle if worker not in dead]
        self._fatal_rounds = self._fatal_rounds + 1 if len(dead) >= self._count else 0
        for worker in dead:
            log.warning("decode worker %d died (%s)", worker.process.pid, await worker.stop(kill=True))
        try:
            while len(self._idle) + self._busy < self._count:
                self._idle.append(await _Worker.start(self._command))
        except OSError as exc:
            log.error("cannot start decode workers: %s", exc.strerror)
            return False
        await self._end_spare()
        return self._fatal_rounds < FATAL_ROUNDS

    async def convert(self, target_dir: Path, formats: Sequence[str], *, deadline_ns: int) -> dict[str, Any]:
        """The worker's `conversion` object for a target's folder. Raises DecodeError."""
        with metrics.decode() as job:
            return await self._convert(target_dir, formats, deadline_ns, job)

    async def answer(self, capture_dir: Path, targets: Sequence[Path]) -> pb.CaptureAnswer | None:
        """Where the time of a capture went, from its decoded targets; None where nobody can tell in time.

        One capture at a time, beside the turns: nobody waits for it.
        """
        if not targets or self._answers_waiting >= MAX_ANSWERS_WAITING:
            return None
        self._answers_waiting += 1
        try:
            async with self._answering:
                said = await self._ask_about(capture_dir, targets)
        except (Crashed, TooLate, OSError) as exc:
            log.warning("cannot analyse %s: %s", capture_dir, exc or type(exc).__name__)
            return None
        finally:
            self._answers_waiting -= 1
        found = said.get("answer")
        if not isinstance(found, dict):
            log.warning("cannot analyse %s: %s", capture_dir, clean(str(said), 500))
            return None
        verdict, cause = (clean(str(found.get(name, "")), MAX_ANSWER_CHARS) for name in ("verdict", "cause"))
        return pb.CaptureAnswer(verdict=verdict, cause=cause) if verdict else None

    async def _ask_about(self, capture_dir: Path, targets: Sequence[Path]) -> dict[str, Any]:
        worker = await self._take()
        job = self._job(capture_dir, ANSWER_NS) | {"traces": list(map(str, targets)), "reads_only": True}
        said = await worker.within(ANSWER_NS / 1e9, worker.ask(job))
        self._idle.append(worker)
        return said

    async def _convert(
        self, target_dir: Path, formats: Sequence[str], deadline_ns: int, job: metrics.Decode
    ) -> dict[str, Any]:
        async with self._working():
            job.begins()
            crash = ""
            while await self._may_try(target_dir):
                try:
                    conversion = await self._try(target_dir, formats, deadline_ns)
                except Crashed as exc:
                    log.error("decoding %s crashed its worker (%s)", target_dir, exc.how)
                    crash = exc.how
                    metrics.DECODER_CRASHES.inc()
                except DecodeError as exc:
                    if exc.code != VerdictReason.DECODE_TIMEOUT:
                        forget_tries(target_dir)
                    raise
                except asyncio.CancelledError:
                    take_back_try(target_dir)  # the daemon is being stopped; the trace is not to blame
                    raise
                else:
                    forget_tries(target_dir)
                    return conversion
            why = f"the decoder crashed ({crash})" if crash else "the decoder or the daemon ended during an earlier try"
            raise DecodeError(
                VerdictReason.DECODE_FAILED,
                f"{why}; gave up after {MAX_TRIES} tries; {RAW_KEPT} {target_dir}/raw",
            )

    async def _may_try(self, target_dir: Path) -> bool:
        """Notes the try on disk first, so that the next daemon knows of it whatever happens to this one."""
        try:
            return await asyncio.to_thread(begin_try, target_dir)
        except OSError as exc:
            raise DecodeError(
                VerdictReason.DISK_FULL if is_full(exc) else VerdictReason.STORE_IO,
                f"cannot record the start of decoding ({exc.strerror}); {RAW_KEPT} {target_dir}/raw",
            ) from exc

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        async with self._slots.turn():
            self._busy += 1
            if self._busy > self._count:
                self._spare_used_at = self._clock()
            try:
                yield
            finally:
                self._busy -= 1

    async def _try(self, target_dir: Path, formats: Sequence[str], deadline_ns: int) -> dict[str, Any]:
        worker = await self._take()
        job = self._job(target_dir, deadline_ns) | {"formats": list(formats)}
        try:
            answer = await worker.within(deadline_ns / 1e9, self._watched(worker, job, target_dir))
        except TooLate:
            raise DecodeError(
                VerdictReason.DECODE_TIMEOUT,
                f"decoding took longer than {format_duration(deadline_ns)} (kinetod --decode-deadline); "
                f"{RAW_KEPT} {target_dir}/raw",
            ) from None
        self._idle.append(worker)
        return _conversion(answer, target_dir)

    def _job(self, folder: Path, deadline_ns: int) -> dict[str, Any]:
        """A job without what is to be done."""
        self._jobs += 1
        bounds = self._bounds()
        return {
            "id": self._jobs,
            "target_dir": str(folder),
            "memory_bytes": bounds.memory_bytes,
            "cpu_s": (deadline_ns // 10**9 + 1) * (os.cpu_count() or 1),
            "required": bounds.required,
        }

    async def _watched(self, worker: _Worker, job: Mapping[str, Any], target_dir: Path) -> dict[str, Any]:
        """Returns the worker's answer. Raises DecodeError if it writes too much, Crashed."""
        output = self._outputs[target_dir] = OutputWatch(target_dir, self._room)
        asking = asyncio.create_task(worker.ask(job))
        try:
            while not (await asyncio.wait({asking}, timeout=WATCH_S))[0]:
                with contextlib.suppress(OSError):  # the folder is gone, or the disk does not answer
                    await asyncio.to_thread(output.look)
            return asking.result()
        except Overrun as exc:
            raise DecodeError(exc.code, f"{exc}; {RAW_KEPT} {target_dir}/raw") from exc
        finally:
            asking.cancel()
            del self._outputs[target_dir]

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            await worker.stop(kill=True)
        return await _Worker.start(self._command)

    async def _end_spare(self) -> None:
        """Ends the worker of the spare turn if it has not been needed for long."""
        while self._idle and len(self._idle) + self._busy > self._count:
            if self._clock() - self._spare_used_at < SPARE_KEPT_S:
                return
            await self._idle.pop(0).stop(kill=False)

    async def stop(self) -> None:
        """Ends the idle workers; those at work end with their jobs."""
        workers, self._idle = self._idle, []
        await asyncio.gather(*(worker.stop(kill=False) for worker in workers))


def _conversion(answer: Mapping[str, Any], target_dir: Path) -> dict[str, Any]:
    """Checks an answer. Raises DecodeError, and Crashed if the job's own process ended without one; its worker
    continues.
    """
    if "died" in answer:
        raise Crashed(how=clean(str(answer["died"]), 200))
    conversion = answer.get("conversion")
    if answer.get("ok") is True and isinstance(conversion, dict):
        return conversion
    code = clean_code(str(answer.get("reason_code", "")), VerdictReason.DECODE_FAILED)
    reason = clean(str(answer.get("reason", "")), 1000) or "the decoder gave no reason"
    raise DecodeError(code, f"{reason}; {RAW_KEPT} {target_dir}/raw")
