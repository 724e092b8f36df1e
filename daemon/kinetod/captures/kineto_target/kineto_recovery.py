"""Recovers targets whose own libkineto was asked by a daemon that has ended: their files may still come.

libkineto knows nothing of the daemon's end: a request that it was sent is carried out. So the next daemon awaits the
file as the first one would have, and the target is DONE when it is whole. Whether the request was sent is not always
known, since a daemon may be killed at any moment; polls that say that the profiler is free tell. The first one does not
suffice: a libkineto that has an earlier answer left in its socket reads the request as the answer to that one.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.errors import TraceError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file

from kinetod.base.errors import VerdictReason
from kinetod.captures.kineto_target.kineto_recorder import FreePolls, KinetoRecorder, is_alive
from kinetod.captures.kineto_target.kineto_result import Fetch, store_kineto_file
from kinetod.captures.request.capture_spec import DEFAULT_FORMATS
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.services import Services
from kinetod.kineto_files.interface import FolderUnreachable, OpenTraceFolder
from kinetod.processes.credentials import Credentials, read
from kinetod.processes.identity import ProcessKey, start_time_ns

_SAME_START_NS = 2 * 10**9  # two daemons reckon the same start from boot times that may differ by a second
_RESTARTED = "the daemon ended before the capture did (killed, crashed or stopped)"
_POLLS = 2
_NOTHING = TargetInfo(capture_id="", host="", pid=0, process_name="")


async def recover_kineto_target(
    services: Services, recorder: KinetoRecorder, target: pb.Target, directory: Path, formats: tuple[str, ...]
) -> Path | None:
    """Gives the target its verdict. Returns what to remove once the verdict is stored."""
    info = _NOTHING
    try:
        asked, info = OnDemandRequest.read(directory), TargetInfo.read(directory)
    except TraceError as exc:
        ending = _failed(f"{_RESTARTED}, and its notes cannot be read: {exc}")
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
        """Waits for the file and fetches it. DONE, or why there is none."""
        found = await asyncio.to_thread(_found, self.target)
        if found is None:
            return _fetched_before(self.directory, f"{_RESTARTED}, and so has process {self.target.pid}")
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
            if ending != DONE:  # what comes now is nobody's
                await self.recorder.remove(folder)
            return ending
        finally:
            folder.close()

    async def _from(self, folder: OpenTraceFolder, key: ProcessKey) -> Ending:
        self.recorder.take(key, self.capture_id)
        polls, looked_after = FreePolls(time.time_ns()), False
        try:
            while not (await folder.look()).whole:
                if kineto_file(self.directory).exists():  # fetched, and removed where it was
                    return DONE
                if looked_after:  # the file was whole before the last of those polls, or never will be
                    return _failed(f"{_RESTARTED}, and {self._nothing_came()}")
                looked_after = polls.count(self.recorder.process(key)) >= _POLLS
                if time.time_ns() > self.asked.until_ns:
                    return _failed(f"{_RESTARTED}, and libkineto's file did not come in time")
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
            return "libkineto had not asked for the request yet"
        return "libkineto is free again without having written a file"


def _failed(reason: str) -> Ending:
    return Ending(EndState.FAILED, VerdictReason.DAEMON_RESTARTED, reason)


def _fetched_before(directory: Path, reason: str) -> Ending:
    """DONE if the copy is there; whether it is whole is the decoder's matter."""
    return DONE if kineto_file(directory).exists() else _failed(reason)


def _found(target: pb.Target) -> tuple[ProcessKey, Credentials] | None:
    """The process by this daemon's reckoning, and whose it is; None if it has ended."""
    try:
        start_ns = start_time_ns(target.pid)
        if abs(start_ns - target.start_time_ns) > _SAME_START_NS:
            return None
        return ProcessKey(target.pid, start_ns), read(target.pid)
    except OSError:
        return None
