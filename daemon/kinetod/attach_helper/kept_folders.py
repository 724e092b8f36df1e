"""The attach helper's own folders, in which the libkineto of other users' processes writes traces.

Theory of operation
    A folder is made for one trace of one process, if the policy allows entering that process. It is kept open, so that
    it can be read and removed after the process and its /proc/PID/root are gone. Helper processes do the work: a
    hostile process may have chosen a file system that does not answer.

    The front end names the folder and asks to look, to open the file, or to remove both. A folder that this service
    does not know because it was restarted is opened again through the process, while that lives. Folders that nobody
    asks to remove are removed here: once their time is over, or once the process has ended and there was no request for
    as long as a front end takes to fetch a file. Leftovers of a service that died are removed when the next one makes a
    folder there.

Rules
    At most MAX_FOLDERS are kept, MAX_PER_USER for one user's processes, each with one descriptor.
    A user's folders use PER_USER helper processes at a time. A folder that did not answer is not queried again, and its
    user's other folders are left alone for HUNG_S, then longer: a process blocked in the kernel cannot be killed.

    Making a folder requires the same as an attach: the policy, the credentials that the front end has approved, and
    both again afterwards. Later actions in a folder are checked against the policy again, with the facts known about
    the process once it has ended; only removal is not, since the folder and libkineto's file in it belong to the
    helper.
"""

import asyncio
import io
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from kinetod.attach.attach_types import AttachCode, replaced
from kinetod.attach_helper import messages
from kinetod.attach_helper.allow_list import Policy, ProcessOwner, owner
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.attach_helper.folder_queries import FOLDER, LOOK, MAKE, OPEN, REMOVE, REOPEN, TRY
from kinetod.attach_helper.messages import Denial
from kinetod.base.safe_text import clean
from kinetod.kineto_files import own_folder
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey
from kinetod.supervise.child import Crashed, TooLate

log = logging.getLogger(__name__)

MAX_FOLDERS = 512
MAX_PER_USER = 256  # all root containers count as one user
PER_USER = 2
ASK_S = 5.0  # usually a few ms
WARM_UP_S = 20.0  # before that, for Python to start
HUNG_S, MAX_HUNG_S = 60.0, 86400.0  # doubled each time
FETCH_S = 60.0  # from the end of a process until the front end has opened its file
REAP_PERIOD_S = 5.0
_MAX_REASON_CHARS = 1000
_NO_ANSWER = (
    f"the folder where libkineto writes did not respond within {ASK_S:g} s; is it on a network file system? Let "
    "kinetod's agent record (--recorder agent)."
)
Check = Callable[[], Credentials]  # raises Denial, with AttachCode.GONE if the process has ended


class _NoAnswer(Denial):
    pass


class _Pause(NamedTuple):
    """How long a user's folders are left alone: until when (monotonic), and the total length."""

    until_s: float
    pause_s: float


@dataclass(slots=True)
class KeptFolder:
    """One folder. boot_time_ns: the origin of the key's start time; touched_s: time of the last request for it."""

    key: ProcessKey
    boot_time_ns: int
    credentials: Credentials
    owner: ProcessOwner
    descriptor: int
    name: str
    file: str
    path: str
    touched_s: float
    hung: bool = False

    @property
    def uid(self) -> int:
        """The user who owns new files of the process."""
        return self.credentials.uids[-1]

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class KeptFolders:
    """All kept folders. is_alive: whether the process of a folder exists."""

    def __init__(
        self,
        helpers: AttachHelpers,
        is_alive: Callable[[KeptFolder], bool],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        reap_period_s: float = REAP_PERIOD_S,
        fetch_s: float = FETCH_S,
    ) -> None:
        self._helpers = helpers
        self._is_alive = is_alive
        self._clock = clock
        self._monotonic = monotonic
        self._reap_period_s = reap_period_s
        self._fetch_s = fetch_s
        self._kept: dict[str, KeptFolder] = {}
        self._making: Counter[int] = Counter()  # by user
        self._hung: dict[int, _Pause] = {}  # by user
        self._slots: dict[int, asyncio.Semaphore] = {}
        self._reaper: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """The number of kept folders."""
        return len(self._kept)

    def get(self, key: ProcessKey, name: str) -> KeptFolder | None:
        """The folder of this process with this name, if it is kept."""
        found = self._kept.get(name)
        return found if found is not None and found.key == key else None

    async def make(self, asked: messages.MakeFolder, found: Credentials, owner: ProcessOwner) -> messages.FolderMade:
        """Makes a folder in a process with these credentials. Raises Denial."""
        question = {"until_s": asked.until_s, "step": TRY if asked.only_try else MAKE}
        path, _ = await self._enter(asked, question, found, owner)
        return messages.FolderMade(path=path)

    async def reopen(self, asked: messages.FolderUse, found: Credentials, owner: ProcessOwner) -> KeptFolder:
        """Opens a folder that was made before. Raises Denial."""
        _, folder = await self._enter(asked, {"step": REOPEN, "name": asked.name}, found, owner)
        assert folder is not None  # only a trial returns none
        return folder

    async def _enter(
        self,
        asked: messages.MakeFolder | messages.FolderUse,
        question: Mapping[str, Any],
        found: Credentials,
        owner: ProcessOwner,
    ) -> tuple[str, KeptFolder | None]:
        uid = found.uids[-1]
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        self._check_room(uid)
        whose = {"pid": key.pid, "start_time_ns": key.start_time_ns, "boot_time_ns": asked.boot_time_ns, "uid": uid}
        self._making[uid] += 1
        try:
            said, descriptor = await self._ask({**question, **whose}, None, uid)
        finally:
            self._making[uid] -= 1
            self._making = +self._making  # drops users with a count of zero
        path = str(said["path"])
        if descriptor is None:
            return path, None
        name = PurePosixPath(path).name
        kept = KeptFolder(key, asked.boot_time_ns, found, owner, descriptor, name, asked.file, path, self._monotonic())
        self._forget(name)  # opened twice at the same time
        self._kept[name] = kept
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._reap(), name="kept folders")
        return path, kept

    def _check_room(self, uid: int) -> None:
        self._check_hung(uid)
        own = self._making[uid] + sum(each.uid == uid for each in self._kept.values())
        if own >= MAX_PER_USER or self.count + self._making.total() >= MAX_FOLDERS:
            raise Denial(
                AttachCode.FAILED,
                f"the attach helper already keeps {self.count} folders for libkineto's traces (at most {MAX_FOLDERS}), "
                f"{own} of them for uid {uid} (at most {MAX_PER_USER} per user); wait until other captures have ended",
            )

    async def look(self, folder: KeptFolder) -> messages.FolderSeen:
        """Checks for the file. Raises Denial."""
        said, _ = await self._ask_in(folder, LOOK)
        return messages.FolderSeen(writing_bytes=said["writing_bytes"], whole=said["whole"])

    async def open(self, folder: KeptFolder) -> tuple[messages.TraceFileReply, int | None]:
        """Opens the complete file; the caller owns the descriptor. Raises Denial."""
        said, descriptor = await self._ask_in(folder, OPEN)
        return messages.TraceFileReply(refused=clean(str(said["refused"]), _MAX_REASON_CHARS)), descriptor

    async def remove(self, folder: KeptFolder) -> messages.FolderRemoved:
        """Removes file and folder; the folder is no longer kept, even if that fails. Raises Denial."""
        if self._kept.get(folder.name) is folder:
            del self._kept[folder.name]
        try:
            await self._ask_in(folder, REMOVE)
        finally:
            folder.close()
        return messages.FolderRemoved()

    async def stop(self) -> None:
        """Removes the folders of processes that have ended. The others are left to the next service."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        for folder in list(self._kept.values()):
            if self._is_alive(folder):
                self._forget(folder.name)
            else:
                await self._remove_left(folder)

    async def _reap(self) -> None:
        while self._kept:
            await asyncio.sleep(self._reap_period_s)
            for folder in list(self._kept.values()):
                idle_s = self._monotonic() - folder.touched_s
                over = own_folder.until_s(folder.name) < self._clock()
                if over or (idle_s > self._fetch_s and not self._is_alive(folder)):
                    await self._remove_left(folder)

    async def _remove_left(self, folder: KeptFolder) -> None:
        log.info("%s of process %d was abandoned by its front end: removing it", folder.path, folder.key.pid)
        try:
            await self.remove(folder)
        except Denial as exc:
            log.warning("%s of process %d could not be removed: %s", folder.path, folder.key.pid, exc)

    def _forget(self, name: str) -> None:
        if (folder := self._kept.pop(name, None)) is not None:
            folder.close()

    async def _ask_in(self, folder: KeptFolder, step: str) -> tuple[dict[str, Any], int | None]:
        self._check_hung(folder.uid)
        if folder.hung:
            raise Denial(AttachCode.FAILED, _NO_ANSWER)
        if folder.descriptor < 0:
            raise Denial(AttachCode.FAILED, f"{folder.path} of process {folder.key.pid} has been removed")
        folder.touched_s = self._monotonic()
        question = {"step": step, "uid": folder.uid, "file": folder.file, "name": folder.name}
        inside = os.dup(folder.descriptor)  # it may be closed in the meantime
        try:
            return await self._ask(question, inside, folder.uid, f"{folder.path} of process {folder.key.pid}: ")
        except _NoAnswer:
            folder.hung = True
            raise
        finally:
            os.close(inside)

    async def _ask(
        self, question: Mapping[str, Any], descriptor: int | None, uid: int, where: str = ""
    ) -> tuple[dict[str, Any], int | None]:
        """Sends a query to a helper. where: the place to name in a problem. Raises Denial."""
        slots = self._slots.setdefault(uid, asyncio.Semaphore(PER_USER))
        try:
            async with slots:
                said, brought = await self._helpers.ask_with(
                    {"do": FOLDER, **question}, descriptor, deadline_s=ASK_S, start_s=WARM_UP_S
                )
        except TooLate:
            before = self._hung.get(uid)
            pause_s = HUNG_S if before is None else min(2 * before.pause_s, MAX_HUNG_S)
            self._hung[uid] = _Pause(self._monotonic() + pause_s, pause_s)
            raise _NoAnswer(AttachCode.FAILED, _NO_ANSWER) from None
        except (OSError, Crashed) as exc:
            raise Denial(AttachCode.FAILED, f"the folder could not be used: {exc}") from exc
        finally:
            if not slots.locked() and not self._making[uid] and all(each.uid != uid for each in self._kept.values()):
                self._slots.pop(uid, None)
        if problem := said.get("problem"):
            raise Denial(AttachCode.FAILED, clean(f"{where}{problem}", _MAX_REASON_CHARS))
        return said, brought

    def _check_hung(self, uid: int) -> None:
        """Raises Denial while a user's folders are left alone."""
        now = self._monotonic()
        self._hung = {each: pause for each, pause in self._hung.items() if now < pause.until_s + pause.pause_s}
        if uid in self._hung and now < self._hung[uid].until_s:
            raise Denial(
                AttachCode.FAILED,
                f"{_NO_ANSWER} Folders of uid {uid} are not used for {self._hung[uid].pause_s:.0f} s",
            )


async def make_folder(
    folders: KeptFolders, asked: messages.MakeFolder, check: Check, proc: Path
) -> messages.FolderMade:
    """Makes a folder. Raises Denial, AttachError."""
    found = check()
    _same(asked, Credentials.from_dict(msgspec.structs.asdict(asked.approved)), found)
    made = await folders.make(asked, found, owner(asked.target.pid, found, proc))
    try:
        _same(asked, found, check())
    except BaseException:
        if (folder := folders.get(_key_of(asked), Path(made.path).name)) is not None:
            await folders.remove(folder)
        raise
    return made


async def use_folder(
    folders: KeptFolders, asked: messages.FolderUse, check: Check, policy: Policy, proc: Path
) -> tuple[messages.FolderAnswer, io.FileIO | None]:
    """Looks into a folder, opens the file in it, or removes both. Raises Denial, AttachError."""
    kept = folders.get(_key_of(asked), asked.name)
    if kept is not None and isinstance(asked, messages.RemoveFolder):
        return await folders.remove(kept), None
    folder = await _allowed(folders, kept, asked, check, policy, proc)
    if folder.file != asked.file:
        raise Denial(AttachCode.NOT_PERMITTED, f"{folder.path} was created for a file other than {asked.file}")
    if isinstance(asked, messages.RemoveFolder):
        return await folders.remove(folder), None
    if isinstance(asked, messages.LookIntoFolder):
        return await folders.look(folder), None
    said, descriptor = await folders.open(folder)
    return said, None if descriptor is None else io.FileIO(descriptor)


async def _allowed(
    folders: KeptFolders, kept: KeptFolder | None, asked: messages.FolderUse, check: Check, policy: Policy, proc: Path
) -> KeptFolder:
    try:
        found = check()
    except Denial as exc:
        if kept is None or exc.code != AttachCode.GONE:
            raise
        if why := policy.refuses_owner(kept.owner, administrator=True):  # its creator has been checked
            reason = f"process {kept.key.pid}: the attach helper's policy forbids it: {why}"
            raise Denial(AttachCode.NOT_PERMITTED, reason) from exc
        return kept
    if kept is not None:
        _same(asked, kept.credentials, found)
        return kept
    return await folders.reopen(asked, found, owner(asked.target.pid, found, proc))


def _key_of(asked: messages.MakeFolder | messages.FolderUse) -> ProcessKey:
    return ProcessKey(asked.target.pid, asked.target.start_time_ns)


def _same(asked: messages.MakeFolder | messages.FolderUse, before: Credentials, found: Credentials) -> None:
    """Raises AttachError if the process has been replaced."""
    if difference := before.difference(found):
        raise replaced(asked.target.pid, difference)
