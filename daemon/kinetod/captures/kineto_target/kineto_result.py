"""From libkineto's file in the process's folder to the target's verdict: fetches, decodes and removes it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_size
from kineto_trace.errors import TraceError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file

from kinetod.base.errors import VerdictReason
from kinetod.captures.kineto_target.kineto_recorder import FreePolls, KinetoRecorder, is_alive
from kinetod.captures.request.capture_spec import DEFAULT_FORMATS
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.result.verdict import DONE, Ending, EndState, final
from kinetod.captures.target.conversion import convert
from kinetod.captures.target.endings import ending_of_disk
from kinetod.captures.target.record_spool import DiskFull, disk_error
from kinetod.captures.target.services import Services
from kinetod.kineto_files.interface import FileRefused, FileTooLarge, FolderUnreachable, OpenTraceFolder
from kinetod.processes.credentials import Credentials, read
from kinetod.processes.identity import ProcessKey, start_time_ns

_CHECK_BYTES = 16 << 20  # the disk is checked once for this many bytes
_SAME_START_NS = 2 * 10**9  # two daemons compute the same start from boot times that may differ by a second
_RESTARTED = "the daemon ended before the capture did (killed, crashed or stopped)"
_POLLS = 2
_NOTHING = TargetInfo(capture_id="", host="", pid=0, process_name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What is needed to fetch one file. check_share raises ShareUsed once the user's share of the store is used up."""

    services: Services
    recorder: KinetoRecorder
    folder: OpenTraceFolder
    directory: Path
    check_share: Callable[[], None] = lambda: None

    async def file(self, request: OnDemandRequest) -> Ending:
        """Copies the complete file and removes the original. Returns DONE, or why that failed."""
        config = self.services.config
        try:
            await self.folder.copy(
                kineto_file(self.directory),
                max_bytes=config.max_trace_bytes,
                on_bytes=self._checker(),
                deadline_s=config.process_deadline_ns / 1e9,
            )
            ending = DONE
        except FileRefused as exc:
            reason = f"libkineto's file in {request.folder} was rejected: {exc}; none of it was kept"
            ending = Ending(EndState.FAILED, VerdictReason.FILE_DAMAGED, reason)
        except FileTooLarge:
            limit = format_size(config.max_trace_bytes)
            reason = f"libkineto's file is larger than the {limit} allowed per target (kinetod --max-trace-bytes)"
            ending = Ending(EndState.FAILED, VerdictReason.TRACE_LIMIT, reason)
        except FolderUnreachable as exc:
            reason = f"libkineto's file in {request.folder} could not be fetched: {exc}"
            ending = Ending(EndState.FAILED, VerdictReason.NO_FILE, reason)
        except DiskFull as exc:
            ending = failed(exc)
        except TimeoutError:
            where = f"{request.folder} took too long; is the folder on a network file system?"
            reason = f"reading libkineto's file in {where}"
            ending = Ending(EndState.FAILED, VerdictReason.NO_FILE, reason)
        except OSError as exc:
            ending = failed(disk_error(exc, self.directory))
        await self.recorder.remove(self.folder)
        return ending

    def _checker(self) -> Callable[[int], None]:
        """A callback for every part that was read. Raises DiskFull."""
        config, services = self.services.config, self.services
        next_at = 0

        def check(size: int) -> None:
            nonlocal next_at
            if size < next_at:
                return
            next_at = size + _CHECK_BYTES
            self.check_share()
            if config.min_free_bytes and services.free_bytes() - config.min_free_bytes < _CHECK_BYTES:
                reserve = format_size(config.min_free_bytes)
                raise DiskFull(
                    f"less than {reserve} is free on the disk of {self.directory} (kinetod --min-free-bytes)"
                )

        return check


def failed(exc: DiskFull) -> Ending:
    """The ending for a store that cannot hold the complete trace."""
    ending = ending_of_disk(exc)
    return Ending(EndState.FAILED, ending.code, ending.reason)


async def store_kineto_file(
    services: Services,
    target: pb.Target,
    directory: Path,
    formats: tuple[str, ...],
    info: TargetInfo,
    ending: Ending,
) -> Path | None:
    """Decodes the fetched file if the ending is DONE and gives the target its verdict, but not yet its last state.

    Returns the path to remove once the verdict is stored.
    """
    garbage: Path | None = directory
    decode_error: tuple[str, str] | None = None
    unreadable = 0
    if ending == DONE:
        try:
            info.write(directory)
            converted = await convert(services, directory, formats, pid=target.pid)
        except DecodeError as exc:
            decode_error, garbage = (exc.code, exc.reason), None
        except OSError as exc:
            ending = failed(disk_error(exc, directory))
        else:
            if converted.summary.activities:
                converted.apply(target)
                unreadable = converted.unreadable
                target.stored_ns = time.time_ns()
                _note_window(target)
                garbage = directory / "raw"
            else:
                ending = Ending(EndState.FAILED, VerdictReason.NOT_TRAINING_YET, _empty_text(target.pid))
    verdict = final(ending, recorded=ending == DONE, dropped=0, unreadable=unreadable, decode_error=decode_error)
    target.verdict, target.reason_code, target.reason = verdict.verdict, verdict.code, verdict.reason
    return garbage


def _empty_text(pid: int) -> str:
    return (
        f"libkineto of process {pid} recorded no activity: the process was still importing torch, or computed nothing "
        "in the window. Trace again once it is training"
    )


def _note_window(target: pb.Target) -> None:
    """Takes the window's times from the trace, if plausible: polls and the file only give approximate ones."""
    start_ns, end_ns = target.summary.window_start_ns, target.summary.window_end_ns
    if target.requested_ns <= start_ns <= end_ns <= target.stored_ns:
        target.collecting_ns, target.collected_ns = start_ns, end_ns


async def recover_kineto_target(
    services: Services, recorder: KinetoRecorder, target: pb.Target, directory: Path, formats: tuple[str, ...]
) -> Path | None:
    """Gives the target its verdict. Returns the path to remove once the verdict is stored."""
    info = _NOTHING
    try:
        asked, info = OnDemandRequest.read(directory), TargetInfo.read(directory)
    except TraceError as exc:
        ending = _failed(f"{_RESTARTED}, and its saved state cannot be read: {exc}")
    else:
        ending = await _Awaited(services, recorder, target, directory, asked, info.capture_id).fetched()
    garbage = await store_kineto_file(services, target, directory, formats or DEFAULT_FORMATS, info, ending)
    target.state, target.state_since_ns = pb.TARGET_STATE_ENDED, time.time_ns()
    return garbage


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The file of one target."""

    services: Services
    recorder: KinetoRecorder
    target: pb.Target
    directory: Path
    asked: OnDemandRequest
    capture_id: str

    async def fetched(self) -> Ending:
        """Waits for the file and fetches it. Returns DONE, or why there is none."""
        found = await asyncio.to_thread(_found, self.target)
        if found is None:
            return _fetched_before(self.directory, f"{_RESTARTED}, and process {self.target.pid} has also ended")
        key, credentials = found
        if credentials.uid != self.target.process.uid:
            return _failed(f"{_RESTARTED}, and process {key.pid} now belongs to uid {credentials.uid}")
        try:
            folder = await self.recorder.folders.reopen(
                key, self.asked.folder, self.asked.name, uid=credentials.uids[-1]
            )
        except (FolderUnreachable, TimeoutError) as exc:
            return _fetched_before(self.directory, f"{_RESTARTED}, and the file cannot be fetched: {exc}")
        try:
            ending = await self._from(folder, key)
            if ending != DONE:  # nobody needs a file that appears now
                await self.recorder.remove(folder)
            return ending
        finally:
            folder.close()

    async def _from(self, folder: OpenTraceFolder, key: ProcessKey) -> Ending:
        self.recorder.take(key, self.capture_id)
        polls, looked_after = FreePolls(time.time_ns()), False
        try:
            while not (await folder.look()).whole:
                if kineto_file(self.directory).exists():  # fetched, and the original removed
                    return DONE
                if looked_after:  # the file was complete before the last of those polls, or never will be
                    return _failed(f"{_RESTARTED}, and {self._nothing_came()}")
                looked_after = polls.count(self.recorder.process(key)) >= _POLLS
                if time.time_ns() > self.asked.until_ns:
                    return _failed(f"{_RESTARTED}, and libkineto's file did not appear in time")
                if not is_alive(key):
                    return _failed(f"{_RESTARTED}, and process {key.pid} ended before libkineto wrote its file")
                await asyncio.sleep(self.recorder.folders.look_period_s)
        except (OSError, TimeoutError) as exc:
            return _failed(f"{_RESTARTED}, and the file cannot be fetched: {exc}")
        finally:
            self.recorder.free(key, self.capture_id)
        self.recorder.finished(key)
        fetch = Fetch(services=self.services, recorder=self.recorder, folder=folder, directory=self.directory)
        return await fetch.file(self.asked)

    def _nothing_came(self) -> str:
        if not self.asked.sent_ns:
            return "libkineto had not fetched the request yet"
        return "libkineto became idle again without writing a file"


def _failed(reason: str) -> Ending:
    return Ending(EndState.FAILED, VerdictReason.DAEMON_RESTARTED, reason)


def _fetched_before(directory: Path, reason: str) -> Ending:
    """DONE if the copy exists; the decoder decides whether it is complete."""
    return DONE if kineto_file(directory).exists() else _failed(reason)


def _found(target: pb.Target) -> tuple[ProcessKey, Credentials] | None:
    """The process as this daemon identifies it, and its credentials; None if it has ended."""
    try:
        start_ns = start_time_ns(target.pid)
        if abs(start_ns - target.start_time_ns) > _SAME_START_NS:
            return None
        return ProcessKey(target.pid, start_ns), read(target.pid)
    except OSError:
        return None
