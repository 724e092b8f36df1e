"""Common state of all captures by libkineto: polling processes, those recording for a capture, and stray files.

Theory of operation
    libkineto cannot be stopped, so a cancelled or abandoned capture may leave a file that appears later. A background
    task waits for such a file and removes it, until polls say that the profiler is free again, or until the process or
    the daemon ends. One such poll does not suffice: a libkineto with an earlier answer left in its socket reads the
    request only as the answer to a later poll.
"""

import asyncio
import contextlib
import logging
import time

from kinetod.kineto_files.interface import OpenTraceFolder, TraceFolders
from kinetod.kineto_ipc.poller_registry import PollingProcess, PollingProcesses
from kinetod.processes.identity import Identity, ProcessKey

log = logging.getLogger(__name__)

_STRAY_PERIOD_S = 1.0
_STRAY_POLLS = 3


class KinetoRecorder:
    """The polling processes, as captures use them, and the folders they write to."""

    def __init__(self, polling: PollingProcesses, folders: TraceFolders) -> None:
        self.folders = folders
        self._polling = polling
        self._captures: dict[ProcessKey, str] = {}
        self._finished_ns: dict[ProcessKey, int] = {}  # completion time of the last trace of each polling process
        self._strays: set[asyncio.Task[None]] = set()

    def process(self, key: ProcessKey) -> PollingProcess | None:
        """The process with this key, if it polls."""
        return self._polling.get(key)

    def pids(self) -> set[int]:
        """The pids of all that poll."""
        return {process.key.pid for process in self._polling.all()}

    def capture_in(self, key: ProcessKey) -> str:
        """The capture that this process records; "" if there is none."""
        return self._captures.get(key, "")

    def take(self, key: ProcessKey, capture_id: str) -> None:
        """Marks the process as busy with this capture."""
        self._captures[key] = capture_id

    def free(self, key: ProcessKey, capture_id: str) -> None:
        """Undoes `take`."""
        if self._captures.get(key) == capture_id:
            del self._captures[key]

    def finished(self, key: ProcessKey) -> None:
        """Notes that the process's trace is complete: until its next poll, its last one is out of date."""
        self._finished_ns = {each: at for each, at in self._finished_ns.items() if self.process(each) is not None}
        self._finished_ns[key] = time.time_ns()

    def is_tracing(self, process: PollingProcess) -> bool:
        """Whether the profiler of a process is armed or records, as far as is known."""
        return process.tracing and process.last_poll_ns > self._finished_ns.get(process.key, 0)

    async def remove(self, folder: OpenTraceFolder) -> None:
        """Removes libkineto's file; logs a failure."""
        try:
            await folder.remove()
        except (OSError, TimeoutError) as exc:
            log.warning("libkineto's file in %s could not be removed: %s", folder.path, exc or "it is not responding")

    def remove_later(self, process: PollingProcess, folder: OpenTraceFolder, *, since_ns: int, within_s: float) -> None:
        """Removes a file once it is complete or will never be; takes ownership of the folder.

        since_ns: if polls after this time say that the profiler is free, no file will appear. within_s: how long to
        wait.
        """
        removing = self._remove_later(process, folder, since_ns, within_s)
        task = asyncio.create_task(removing, name=f"stray in {folder.path}")
        self._strays.add(task)
        task.add_done_callback(self._strays.discard)

    async def _remove_later(
        self, process: PollingProcess, folder: OpenTraceFolder, since_ns: int, within_s: float
    ) -> None:
        polls = FreePolls(since_ns)

        def may_come() -> bool:
            return is_alive(process.key) and polls.count(process) < _STRAY_POLLS

        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(within_s):
                    while may_come() and not (await folder.look()).whole:
                        await asyncio.sleep(_STRAY_PERIOD_S)
            await self.remove(folder)
        finally:
            folder.close()

    async def stop(self) -> None:
        """Stops waiting for files; abandons blocked operations."""
        strays = list(self._strays)
        for stray in strays:
            stray.cancel()
        await asyncio.gather(*strays, return_exceptions=True)
        await self.folders.stop()


class FreePolls:
    """Counts the polls after a time, in Unix ns, that say that the profiler is free.

    has_recorded: whether one said otherwise.
    """

    def __init__(self, since_ns: int) -> None:
        self.has_recorded = False
        self._last_ns = since_ns
        self._count = 0

    def count(self, process: PollingProcess | None) -> int:
        """The number of such polls in a row, if called more often than the process polls. None: it does not poll."""
        if process is None:
            return self._count
        if process.tracing:
            self._count, self.has_recorded = 0, True
        elif process.last_poll_ns > self._last_ns:
            self._count += 1
        self._last_ns = max(self._last_ns, process.last_poll_ns)
        return self._count


def is_alive(key: ProcessKey) -> bool:
    """Whether the process exists and is not exiting."""
    return Identity(key, uid=0, gid=0, pidfd=None).alive()
