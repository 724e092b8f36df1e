"""Recovers targets that a killed daemon left behind: decodes their records and gives them their verdicts."""

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path

import msgspec
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.errors import TraceError
from kineto_trace.model.target_info import TargetInfo

from kinetod.base.errors import VerdictReason
from kinetod.base.safe_text import clean, clean_code
from kinetod.captures.request.capture_spec import DEFAULT_FORMATS
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.result.verdict import DONE, REASON_CHARS, Ending, EndState, final
from kinetod.captures.target.conversion import convert
from kinetod.captures.target.record_spool import made_records
from kinetod.captures.target.services import Services

_NAME = "ending.json"
_MAX_BYTES = 16 << 10
log = logging.getLogger(__name__)


class NotedEnding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """dropped: records lost because the buffers were full."""

    outcome: EndState
    code: str
    reason: str
    dropped: int

    def ending(self) -> Ending:
        """The noted ending."""
        if self.outcome is EndState.DONE:
            return DONE
        return Ending(
            self.outcome, clean_code(self.code, VerdictReason.DAEMON_RESTARTED), clean(self.reason, REASON_CHARS)
        )


_DECODER = msgspec.json.Decoder(NotedEnding)


def note_ending(directory: Path, ending: Ending, dropped: int) -> None:
    """Notes an ending, unless one is noted already; without records or disk space there is none."""
    file = directory / "raw" / _NAME
    known = NotedEnding(outcome=ending.outcome, code=ending.code, reason=ending.reason, dropped=dropped)
    with contextlib.suppress(OSError):
        if not file.exists():
            write_atomically(file, msgspec.json.encode(known))


def noted_ending(directory: Path) -> NotedEnding | None:
    """The noted ending; None if there is none, or it cannot be read."""
    try:
        with (directory / "raw" / _NAME).open("rb") as file:
            return _DECODER.decode(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as exc:
        log.warning("%s: %s", directory, exc)
        return None


async def recover_target(
    services: Services, target: pb.Target, directory: Path, formats: tuple[str, ...], *, armed: bool = False
) -> Path | None:
    """Gives the target its verdict. Returns the path to remove once the verdict is stored.

    armed: whether the capture was still waiting to be started, as far as is known.
    """
    garbage: Path | None = None
    reason = "the daemon ended before the capture did (killed, crashed or stopped)"
    ending = Ending(EndState.PARTIAL, VerdictReason.DAEMON_RESTARTED, reason)
    decode_error: tuple[str, str] | None = None
    cut: tuple[str, ...] = ()
    dropped = 0
    exists = directory.is_dir()
    recorded = exists and await asyncio.to_thread(_prepare, directory)
    if armed and not recorded:
        waited = "the daemon ended (killed, crashed or stopped) while the capture was waiting to be started"
        ending = Ending(EndState.FAILED, VerdictReason.DAEMON_RESTARTED, waited)
    elif not exists:
        ending = Ending(EndState.FAILED, VerdictReason.DAEMON_RESTARTED, f"{reason}, and the target's folder is gone")
    elif recorded:
        if (known := await asyncio.to_thread(noted_ending, directory)) is not None:
            ending, dropped = known.ending(), known.dropped
        try:
            converted = await convert(services, directory, formats or DEFAULT_FORMATS, pid=target.pid)
        except DecodeError as exc:
            decode_error = (exc.code, exc.reason)
        else:
            converted.apply(target)
            cut = converted.cut
            target.stored_ns = time.time_ns()
            garbage = directory / "raw"
    if not recorded:
        garbage = directory
    verdict = final(
        ending, recorded=recorded, dropped=dropped, made=made_records(target), cut=cut, decode_error=decode_error
    )
    target.verdict = verdict.verdict
    target.reason_code = verdict.code
    target.reason = verdict.reason
    target.state = pb.TARGET_STATE_ENDED
    target.state_since_ns = time.time_ns()
    return garbage


def _prepare(directory: Path) -> bool:
    """Returns whether there are records of the window, and records where the window ended."""
    spools = list(directory.glob("raw/*/buffers.bin"))
    if not any(spool.stat().st_size for spool in spools):
        return False
    try:
        info = TargetInfo.read(directory)
    except TraceError as exc:
        log.warning("%s: %s", directory, exc)
        return False
    if not info.window_start_ns:
        return False  # only the warm-up
    if not info.window_end_ns:
        last_write_ns = max(spool.stat().st_mtime_ns for spool in spools)
        replace(info, window_end_ns=max(last_write_ns, info.window_start_ns + 1)).write(directory)
    return True
