"""Access to processes' folders for a front end that may open none of them: through the attach helper.

Theory of operation
    The helper makes a folder of its own for each trace, in which libkineto is told to write. It reports whether the
    file exists, opens the complete file, and removes both. The file's descriptor is checked here once more, and copied
    from in a thread.

    If the helper refuses a query or does not answer while a trace is awaited, that is an OSError with its text: the
    next query may succeed.
"""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath

import msgspec

from kinetod.attach.attach_types import Approval
from kinetod.attach_helper import messages
from kinetod.attach_helper.helper_client import HelperService, HelperUnreachable, refusal, target_of
from kinetod.base.fair_slots import FairSlots
from kinetod.kineto_files.direct_folders import FileThreads
from kinetod.kineto_files.interface import FileRefused, FolderUnreachable, OpenTraceFolder, Sight
from kinetod.kineto_files.trace_folder import check_file, copy_file
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey

ASK_DEADLINE_S = 15.0  # the helper gives up after 5 s, once it is this folder's turn
_SPARE_S = 3600  # longer than the file is wanted: a large one takes time to write
_TURNS, _SPARE_TURNS = 16, 8  # queries at a time: the service has 64 connections for all requests
_TRIED_NAME = "kinetod-try.json"
_MAX_UNTIL_S = (1 << 32) - 1  # the bound of messages.Id
_Ask = Callable[[messages.FolderUse], Awaitable[tuple[messages.Answer, int | None]]]


class HelperTraceFolders:
    """Implements TraceFolders through the attach helper."""

    look_period_s = 0.5  # each look involves two other processes

    def __init__(self, helper: HelperService) -> None:
        self._helper = helper
        self._threads = FileThreads()
        self._turns = FairSlots(_TURNS, spare=_SPARE_TURNS)

    async def problem(self, key: ProcessKey, approval: Approval) -> str:
        """See TraceFolders: the helper makes a folder and removes it."""
        try:
            await self._made(key, approval, _TRIED_NAME, 0, only_try=True)
        except FolderUnreachable as exc:
            return str(exc)
        return ""

    async def open(self, key: ProcessKey, approval: Approval, name: str, *, until_ns: int) -> OpenTraceFolder:
        """See TraceFolders: the helper makes a folder."""
        until_s = min(until_ns // 10**9 + _SPARE_S, _MAX_UNTIL_S)
        path = await self._made(key, approval, name, until_s, only_try=False)
        return _HelperTraceFolder(self._ask, self._threads, key, path, name, approval.credentials.uids[-1])

    async def _made(self, key: ProcessKey, approval: Approval, name: str, until_s: int, *, only_try: bool) -> str:
        asked = messages.MakeFolder(
            target=target_of(key),
            approved=msgspec.convert(approval.credentials.to_dict(), messages.Approved),
            administrator=approval.administrator,
            boot_time_ns=BOOT_TIME_NS,
            file=name,
            until_s=until_s,
            only_try=only_try,
        )
        try:
            said, _ = await self._ask(asked)
        except HelperUnreachable as exc:
            raise FolderUnreachable(f"process {key.pid}: {exc}") from exc
        if not isinstance(said, messages.FolderMade):
            raise FolderUnreachable(refusal(said, key.pid).reason)
        return said.path

    async def _ask(self, asked: messages.MakeFolder | messages.FolderUse) -> tuple[messages.Answer, int | None]:
        async with self._turns.turn():
            return await self._helper.ask(asked, deadline_s=ASK_DEADLINE_S)

    async def reopen(self, key: ProcessKey, path: str, name: str, *, uid: int) -> OpenTraceFolder:
        """See TraceFolders: the helper has the folder open, or opens it at the first look."""
        folder = _HelperTraceFolder(self._ask, self._threads, key, path, name, uid)
        try:
            await folder.look()
        except OSError as exc:
            raise FolderUnreachable(str(exc)) from exc
        return folder

    async def stop(self) -> None:
        """See TraceFolders."""
        self._threads.stop()


class _HelperTraceFolder:
    """An OpenTraceFolder that the helper keeps open."""

    def __init__(self, ask: _Ask, threads: FileThreads, key: ProcessKey, path: str, name: str, uid: int) -> None:
        self.path = path
        self._ask_helper = ask
        self._threads = threads
        self._key = key
        self._name = name
        self._uid = uid
        self._removed = False

    async def look(self) -> Sight:
        if self._removed:
            return Sight()
        said, _ = await self._ask(messages.LookIntoFolder)
        if not isinstance(said, messages.FolderSeen):
            raise OSError(refusal(said, self._key.pid).reason)
        return Sight(said.writing_bytes, said.whole)

    async def copy(
        self, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None], deadline_s: float
    ) -> int:
        try:
            said, descriptor = await self._ask(messages.OpenTraceFile)
        except OSError as exc:
            raise FolderUnreachable(str(exc)) from exc
        if descriptor is None:
            if isinstance(said, messages.TraceFileReply):
                raise FileRefused(said.refused or f"{self._name} was not sent by the attach helper")
            raise FolderUnreachable(refusal(said, self._key.pid).reason)

        def work() -> int:
            try:
                check_file(descriptor, self._name, self._uid)
            except BaseException:
                os.close(descriptor)
                raise
            return copy_file(descriptor, destination, max_bytes=max_bytes, on_bytes=on_bytes)

        return await self._threads.run(work, deadline_s=deadline_s)

    async def remove(self) -> None:
        if self._removed:
            return
        said, _ = await self._ask(messages.RemoveFolder)
        if not isinstance(said, messages.FolderRemoved):
            raise OSError(refusal(said, self._key.pid).reason)
        self._removed = True

    async def _ask(
        self, kind: type[messages.LookIntoFolder] | type[messages.OpenTraceFile] | type[messages.RemoveFolder]
    ) -> tuple[messages.Answer, int | None]:
        asked = kind(
            target=target_of(self._key),
            boot_time_ns=BOOT_TIME_NS,
            name=PurePosixPath(self.path).name,
            file=self._name,
        )
        try:
            return await self._ask_helper(asked)
        except HelperUnreachable as exc:
            raise OSError(str(exc)) from exc

    def close(self) -> None:
        """Leaves the folder to the helper, which removes it when its time is over."""
