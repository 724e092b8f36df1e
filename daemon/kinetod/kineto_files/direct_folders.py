"""Access to processes' folders for a daemon that may read them itself: root's, or one of the process's user."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kinetod.attach.attach_types import Approval
from kinetod.kineto_files.interface import FolderUnreachable, OpenTraceFolder, Sight, trace_folder
from kinetod.kineto_files.trace_folder import TraceFolder, copy_file
from kinetod.processes.identity import ProcessKey

_REMOVE_DEADLINE_S = 60.0  # it must wait for its turn
LOOK_DEADLINE_S = 5.0
_THREADS = 8
T = TypeVar("T")


# Threads that read folders of processes. Such a folder may be on a file system that does not answer. So no other part
# of the daemon waits for these threads.
class FileThreads:
    """A few threads, shared by all folders."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "kineto-files")

    async def run(
        self, function: Callable[..., T], *args: Any, deadline_s: float = LOOK_DEADLINE_S, **kwargs: Any
    ) -> T:
        """Calls a function in a thread. Raises TimeoutError, and what the function raises."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(deadline_s):
            return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    def stop(self) -> None:
        """Abandons blocked threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class DirectTraceFolders:
    """Implements TraceFolders with the daemon's own rights."""

    look_period_s = 0.2  # a file is visible for at least 1 s, the period of libkineto's loop

    def __init__(self) -> None:
        self._threads = FileThreads()

    async def problem(self, key: ProcessKey, approval: Approval) -> str:
        """See TraceFolders."""

        def attempt() -> None:
            TraceFolder.open(key, trace_folder(key.pid), approval.credentials.uids[-1]).close()

        try:
            await self._threads.run(attempt)
        except (FolderUnreachable, TimeoutError) as exc:
            return str(exc) or f"the temporary folder of process {key.pid} is not responding"
        return ""

    async def open(self, key: ProcessKey, approval: Approval, name: str, *, until_ns: int) -> OpenTraceFolder:
        """See TraceFolders; a folder that is merely kept open needs no time limit."""
        path = await self._threads.run(trace_folder, key.pid)
        uid = approval.credentials.uids[-1]  # the file system uid, which owns new files
        return await self.reopen(key, path, name, uid=uid)

    async def reopen(self, key: ProcessKey, path: str, name: str, *, uid: int) -> OpenTraceFolder:
        """See TraceFolders."""
        folder = await self._threads.run(TraceFolder.open, key, path, uid)
        return _DirectTraceFolder(self._threads, folder, path, name)

    async def stop(self) -> None:
        """See TraceFolders."""
        self._threads.stop()


class _DirectTraceFolder:
    """An OpenTraceFolder in this process."""

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
