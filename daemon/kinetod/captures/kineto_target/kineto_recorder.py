"""What all captures by libkineto share: which processes poll, which of them record for a capture, and stray files.

Theory of operation
    libkineto cannot be stopped, so that a capture that was cancelled or given up may leave a file that comes later.
    Such a file is awaited in the background and removed, until polls say that the profiler is free again, or the
    process ends; with the daemon's end that ends, too. One such poll does not suffice: a libkineto that has an earlier
    answer left in its socket reads the request only as the answer to a later poll.
"""

import asyncio
import contextlib
import logging
import time

from kinetod.kineto_files.interface import OpenTraceFolder, TraceFolders
from kinetod.kineto_ipc.polling_process import PollingProcess, PollingProcesses
from kinetod.processes.identity import Identity, ProcessKey

log = logging.getLogger(__name__)

_STRAY_PERIOD_S = 1.0
_STRAY_POLLS = 3


class KinetoRecorder:
    """The processes that poll, as captures use them, and the folders into which they write."""

    def __init__(self, polling: PollingProcesses, folders: TraceFolders) -> None:
        self.folders = folders
        self._polling = polling
        self._captures: dict[ProcessKey, str] = {}
        self._finished_ns: dict[ProcessKey, int] = {}  # when the last trace was whole, of those that poll
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
        """Makes the process busy with this capture."""
        self._captures[key] = capture_id

    def free(self, key: ProcessKey, capture_id: str) -> None:
        """Ends what `take` began."""
        if self._captures.get(key) == capture_id:
            del self._captures[key]

    def finished(self, key: ProcessKey) -> None:
        """Notes that the process's trace is whole: until its next poll, what the last one said of it is out of date."""
        self._finished_ns = {each: at for each, at in self._finished_ns.items() if self.process(each) is not None}
        self._finished_ns[key] = time.time_ns()

    def is_tracing(self, process: PollingProcess) -> bool:
        """Whether the profiler of a process is armed or records, as far as is known."""
        return process.tracing and process.last_poll_ns > self._finished_ns.get(process.key, 0)

    async def remove(self, folder: OpenTraceFolder) -> None:
        """Removes what libkineto has written; a failure is logged."""
        try:
            await folder.remove()
        except (OSError, TimeoutError) as exc:
            log.warning("libkineto's file in %s could not be removed: %s", folder.path, exc or "it does not answer")

    def remove_later(self, process: PollingProcess, folder: OpenTraceFolder, *, since_ns: int, within_s: float) -> None:
        """Removes a file once it is whole or will not be; takes over the folder.

        since_ns: polls after this time that say that the profiler is free mean that no file comes any more.
        within_s: how long it may take to come.
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
        """Gives up what is awaited. What still blocks is left to itself."""
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
        """How many there have been in a row, if it is called more often than the process polls. None: it does not."""
        if process is None:
            return self._count
        if process.tracing:
            self._count, self.has_recorded = 0, True
        elif process.last_poll_ns > self._last_ns:
            self._count += 1
        self._last_ns = max(self._last_ns, process.last_poll_ns)
        return self._count


def is_alive(key: ProcessKey) -> bool:
    """Whether the process exists and is not on its way out."""
    return Identity(key, uid=0, gid=0, pidfd=None).alive()
