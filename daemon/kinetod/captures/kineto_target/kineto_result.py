"""From libkineto's file in the process's folder to the target's verdict: fetched, decoded, removed there."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kineto_protos.units import format_size
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file

from kinetod.base.errors import VerdictReason
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.result.verdict import DONE, Ending, EndState, final
from kinetod.captures.target.conversion import convert
from kinetod.captures.target.host_failures import ending_of_disk
from kinetod.captures.target.record_spool import DiskFull, StoreLost
from kinetod.captures.target.services import Services
from kinetod.kineto_files.interface import FileRefused, FileTooLarge, FolderUnreachable, OpenTraceFolder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHECK_BYTES = 16 << 20  # the disk is looked at once for so many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What one file is fetched with. check_share raises ShareUsed once the user's share of the store is used up."""

    services: Services
    recorder: KinetoRecorder
    folder: OpenTraceFolder
    directory: Path
    check_share: Callable[[], None] = lambda: None

    async def file(self, request: OnDemandRequest) -> Ending:
        """Copies the whole file and removes it where it was. DONE, or why that could not be done."""
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
            reason = f"libkineto's file in {request.folder} is refused: {exc}; nothing of it is kept"
            ending = Ending(EndState.FAILED, VerdictReason.FILE_DAMAGED, reason)
        except FileTooLarge:
            limit = format_size(config.max_trace_bytes)
            reason = f"libkineto's file is larger than the {limit} allowed per target (kinetod --max-trace-bytes)"
            ending = Ending(EndState.FAILED, VerdictReason.TRACE_LIMIT, reason)
        except FolderUnreachable as exc:
            reason = f"libkineto's file in {request.folder} could not be fetched: {exc}"
            ending = Ending(EndState.FAILED, VerdictReason.NO_FILE, reason)
        except DiskFull as exc:
            ending = _failed(exc)
        except TimeoutError:
            reason = f"reading libkineto's file in {request.folder} took too long; is the folder on a network?"
            ending = Ending(EndState.FAILED, VerdictReason.NO_FILE, reason)
        except OSError as exc:
            full = exc.errno in _FULL
            problem = f"the disk is full: {self.directory}" if full else f"writing failed ({exc.strerror})"
            ending = _failed(DiskFull(problem) if full else StoreLost(f"{problem}: {self.directory}"))
        await self.recorder.remove(self.folder)
        return ending

    def _checker(self) -> Callable[[int], None]:
        """Called for every part that was read. Raises DiskFull."""
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


def _failed(exc: DiskFull) -> Ending:
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

    Returns what to remove once the verdict is stored.
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
            ending = _failed(StoreLost(f"writing failed ({exc.strerror}): {directory}"))
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
        "in the window. Trace again once it trains"
    )


def _note_window(target: pb.Target) -> None:
    """Takes the times of the window from the trace, if they can be true: the polls and the file tell them roughly."""
    start_ns, end_ns = target.summary.window_start_ns, target.summary.window_end_ns
    if target.requested_ns <= start_ns <= end_ns <= target.stored_ns:
        target.collecting_ns, target.collected_ns = start_ns, end_ns
