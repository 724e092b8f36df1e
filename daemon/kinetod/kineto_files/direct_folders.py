"""The folders of processes, for a daemon that may look into them itself: root's, or the one of the process's user."""

from collections.abc import Callable
from pathlib import Path

from kinetod.attach.attach_types import Approval
from kinetod.kineto_files.file_threads import FileThreads
from kinetod.kineto_files.interface import FolderUnreachable, OpenTraceFolder, Sight
from kinetod.kineto_files.trace_folder import TraceFolder, copy_file
from kinetod.kineto_files.trace_location import trace_folder
from kinetod.processes.identity import ProcessKey

_REMOVE_DEADLINE_S = 60.0  # it has to wait for its turn


class DirectTraceFolders:
    """TraceFolders, by the daemon's own rights."""

    look_period_s = 0.2  # a file shows for 1 s at least: libkineto's loop has that period

    def __init__(self) -> None:
        self._threads = FileThreads()

    async def problem(self, key: ProcessKey, approval: Approval) -> str:
        """As TraceFolders has it."""

        def attempt() -> None:
            TraceFolder.open(key, trace_folder(key.pid), approval.credentials.uids[-1]).close()

        try:
            await self._threads.run(attempt)
        except (FolderUnreachable, TimeoutError) as exc:
            return str(exc) or f"the temporary folder of process {key.pid} does not answer"
        return ""

    async def open(self, key: ProcessKey, approval: Approval, name: str, *, until_ns: int) -> OpenTraceFolder:
        """As TraceFolders has it; a folder that is only held open needs no time limit."""
        path = await self._threads.run(trace_folder, key.pid)
        uid = approval.credentials.uids[-1]  # that of the file system, to which new files belong
        return await self.reopen(key, path, name, uid=uid)

    async def reopen(self, key: ProcessKey, path: str, name: str, *, uid: int) -> OpenTraceFolder:
        """As TraceFolders has it."""
        folder = await self._threads.run(TraceFolder.open, key, path, uid)
        return _DirectTraceFolder(self._threads, folder, path, name)

    async def stop(self) -> None:
        """As TraceFolders has it."""
        self._threads.stop()


class _DirectTraceFolder:
    """OpenTraceFolder, open in this process."""

    def __init__(self, threads: FileThreads, folder: TraceFolder, path: str, name: str) -> None:
        self.path = path
        self._threads = threads
        self._folder = folder
        self._name = name

    async def look(self) -> Sight:
        return await self._threads.run(self._folder.look, self._name)

    async def copy(
        self, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None], deadline_s: float
    ) -> int:
        def work() -> int:
            return copy_file(self._folder.open_file(self._name), destination, max_bytes=max_bytes, on_bytes=on_bytes)

        return await self._threads.run(work, deadline_s=deadline_s)

    async def remove(self) -> None:
        await self._threads.run(self._folder.remove, self._name, deadline_s=_REMOVE_DEADLINE_S)

    def close(self) -> None:
        self._folder.close()
