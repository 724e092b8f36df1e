"""Writes traces where a client of Dynolog asked for them: below dynolog.log_roots, with only its user's rights.

Theory of operation
    A request that names a file creates a promise, stored in the state folder, so that the next daemon fulfils it if
    this one ends before the capture does. When the capture has ended, the files of its targets are copied from the
    store by a process that has become the user before it touches a path (`trace_writer`): a child of this daemon if it
    is root or that very user, otherwise a child of the kinetod-writer service, which decides by a policy of its own. So
    the daemon never opens a path of a caller, and nothing is written that the user could not write. Files are named as
    Kineto names them: NAME_PID.json for NAME.json, with the pid that the answer to the request has.

    The user is the caller. For root, files are written as the user of each traced process, as with Dynolog, where the
    process itself writes the traces.

    Each request also checks whether its file can be written, so that the answer can report it. Refusals are in the
    daemon's log and in the audit log; the trace is in the store in any case.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.store.output_formats import STORED_NAMES, LogFile

from kinetod.access.audit_log import AuditLog
from kinetod.attach.attach_types import Finding, Status
from kinetod.base import metrics
from kinetod.base.fair_slots import FairSlots, fair_share_key
from kinetod.config.settings import Settings
from kinetod.permissions.role_policy import Caller
from kinetod.store.capture_store import key_of
from kinetod.store.path_guard import open_regular
from kinetod.trace_writing.writer_client import WriterClient, WriterUnreachable
from kinetod.trace_writing.writer_messages import (
    CHECK_S,
    FILES_AT_ONCE,
    WRITE_S,
    WRITER,
    NoAnswer,
    WriteQuestion,
    run_writer,
)

log = logging.getLogger(__name__)
PROMISES_FOLDER = "dynolog"  # in the state folder
STOP_S = 3.0
WRITERS = 2  # at a time, and one for a user without any
AUDITED = "(trace file)"
UNIT = "kinetod.service"  # its sandbox settings decide what a child of this daemon sees
CHECK_NAME = "dynolog_files"
ADVICE = "fix this problem, or remove the folder from dynolog.log_roots"
ROOT = 0
FolderOf = Callable[[str, Any], Path]


class BackgroundTasks:
    """failure: the message that is logged, with the exception, when a task fails."""

    def __init__(self, log: logging.Logger, failure: str) -> None:
        self._log = log
        self._failure = failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._log.error(self._failure, exc_info=exc)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Cancels the tasks after a grace period of grace_s seconds."""
        tasks = list(self._tasks)
        if tasks and grace_s:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePromise:
    """Where to write the traces of a capture, and as which user."""

    capture_id: str
    uid: int
    directory: str
    stem: str
    infix: str | None
    format: str

    @property
    def log_file(self) -> LogFile:
        """The names of the files."""
        return LogFile(Path(self.directory), self.stem, self.infix, self.format)


class LogFiles:
    """Writes the files. target_dir: a target's folder in the store, by the capture's id and the target's key."""

    def __init__(
        self,
        settings: Settings,
        audit: AuditLog,
        target_dir: FolderOf,
        *,
        own_uid: int | None = None,
        writer: Sequence[str] = WRITER,
    ) -> None:
        self._settings = settings
        self._audit = audit
        self._target_dir = target_dir
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._writer = writer
        self._folder = settings.current.state_dir / PROMISES_FOLDER
        self._promises: dict[str, FilePromise] = {}
        self._kept: set[str] = set()  # those that are being written
        self._slots = FairSlots(WRITERS, spare=1)
        self._tasks = BackgroundTasks(log, "trace files for a Dynolog client were not written")

    # checking

    async def problem(self, log_file: LogFile, caller: Caller) -> str:
        """Why files could not be written there now; "" if they could."""
        if caller.uid is None:
            return f"{caller} is not a user of this host"
        uid = None if caller.uid == ROOT else caller.uid  # root's files are written as each process's user
        async with self._slots.turn():
            found = await self._write(log_file.directory, uid, [], CHECK_S)
        return found[0]

    def promise(self, capture: pb.Capture, log_file: LogFile, caller: Caller) -> None:
        """Records that the traces of a capture are to be written there. Call it before the capture can end."""
        assert caller.uid is not None  # otherwise there is a problem
        self._promises[capture.id] = made = FilePromise(
            capture_id=capture.id,
            uid=caller.uid,
            directory=str(log_file.directory),
            stem=log_file.stem,
            infix=log_file.infix,
            format=log_file.format,
        )
        self._tasks.begin(asyncio.to_thread(self._save, made))

    # writing

    def capture_ended(self, capture: pb.Capture) -> None:
        """Writes the files of an ended capture in the background, if they were promised. Returns at once."""
        promise = self._promises.get(capture.id)
        if promise is not None and capture.id not in self._kept:
            self._kept.add(capture.id)
            copy = pb.Capture()
            copy.CopyFrom(capture)
            self._tasks.begin(self._keep(promise, copy))

    async def _keep(self, promise: FilePromise, capture: pb.Capture) -> None:
        fair_share_key.set(f"uid {promise.uid}")
        alone = len(capture.targets) == 1
        by_uid: dict[int, list[tuple[Path, str]]] = {}
        for target in capture.targets:
            uid = target.process.uid if promise.uid == ROOT else promise.uid
            folder = self._target_dir(capture.id, key_of(target))
            for file in target.files:
                name = promise.log_file.name(target.pid, file.format, alone=alone)
                by_uid.setdefault(uid, []).append((folder / STORED_NAMES[file.format], name))
            if not target.files:
                name = promise.log_file.name(target.pid, promise.format, alone=alone)
                self._note(promise, uid, name, f"there is no trace: {target.reason}")
        for uid, files in by_uid.items():
            for start in range(0, len(files), FILES_AT_ONCE):
                batch = files[start : start + FILES_AT_ONCE]
                async with self._slots.turn():
                    problems = await self._write(Path(promise.directory), uid, batch, WRITE_S)
                for (_source, name), problem in zip(batch, problems, strict=True):
                    self._note(promise, uid, name, problem)
        self._promises.pop(capture.id, None)
        self._kept.discard(capture.id)
        await asyncio.to_thread(self._forget, capture.id)

    def _note(self, promise: FilePromise, uid: int, name: str, problem: str) -> None:
        path = str(PurePath(promise.directory, name))
        metrics.DYNOLOG_FILES.labels("refused" if problem else "written").inc()
        facts = {"capture": promise.capture_id, "owner_uid": promise.uid, "target_uid": uid, "path": path}
        if problem:
            log.warning(
                "capture %s: %s was not written (the trace is in the store): %s", promise.capture_id, path, problem
            )
        self._audit.write(AUDITED, "refused" if problem else "written", None, **facts, problem=problem)

    async def _write(
        self, directory: Path, uid: int | None, files: Sequence[tuple[Path, str]], deadline_s: float
    ) -> list[str]:
        """The problem of each file, or of the folder if there are no files; "" for none.

        uid: None checks whether anything may be written there at all.
        """
        count = max(1, len(files))
        if not directory.is_absolute():
            return [f"{directory} is not an absolute path"]
        root = _below(directory, self._settings.current.dynolog_log_roots)
        if root is None:
            return [f"{directory} is not inside any folder of dynolog.log_roots"] * count
        with contextlib.ExitStack() as opened:
            try:
                descriptors = await asyncio.to_thread(_opened, [source for source, _name in files], opened)
            except OSError as exc:
                return [f"the stored trace cannot be read: {exc.strerror or exc}"] * count
            named = tuple(zip(descriptors, (name for _source, name in files), strict=True))
            if self._own_uid in (ROOT, uid):
                return await self._written_here(root, directory, uid, named, deadline_s)
            return await self._written_by_service(directory, uid, named, deadline_s)

    async def _written_here(
        self, root: Path, directory: Path, uid: int | None, files: Sequence[tuple[int, str]], deadline_s: float
    ) -> list[str]:
        parts = directory.relative_to(root).parts
        question = WriteQuestion(uid=uid, root=str(root), parts=parts, files=tuple(files), unit=UNIT)
        try:
            return await run_writer(question, deadline_s=deadline_s, command=self._writer)
        except NoAnswer as exc:
            return [str(exc)] * max(1, len(files))

    async def _written_by_service(
        self, directory: Path, uid: int | None, files: Sequence[tuple[int, str]], deadline_s: float
    ) -> list[str]:
        path = self._settings.current.dynolog_writer_socket
        whom = "other users" if uid is None else f"uid {uid}"
        cannot = f"this daemon runs as uid {self._own_uid} and cannot write files as {whom}"
        if path is None:
            return [cannot] * max(1, len(files))
        try:
            return await WriterClient(path).place(uid, directory, files, deadline_s=deadline_s)
        except WriterUnreachable as exc:
            return [f"{cannot}; {exc}: {exc.advice}"] * max(1, len(files))

    # diagnosing

    async def findings(self, *, everybody: bool) -> list[Finding]:
        """Whether traces can be written below each folder of dynolog.log_roots, as far as that does not depend on the
        user.

        everybody: whether the daemon serves all users, or only its own.
        """
        found, roots = [], self._settings.current.dynolog_log_roots
        here = self._own_uid == ROOT or not everybody
        for root in roots:
            async with self._slots.turn():
                if here:
                    (problem,) = await self._written_here(root, root, None, (), CHECK_S)
                else:
                    (problem,) = await self._written_by_service(root, None, (), CHECK_S)
            if problem:
                detail = f"traces cannot be written below {root}: {problem}"
                found.append(Finding(CHECK_NAME, Status.PROBLEM, detail, ADVICE))
        if found or not roots:
            return found
        how = "this daemon" if here else "the writer service"
        return [Finding(CHECK_NAME, Status.OK, f"{how} writes traces below {', '.join(map(str, roots))}")]

    # keeping promises across restarts

    def _save(self, promise: FilePromise) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._folder / f"{promise.capture_id}.json"
            write_atomically(path, json.dumps(asdict(promise)).encode())
            if promise.capture_id not in self._promises:  # written in the meantime
                path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning(
                "capture %s: its files will not be written if the daemon stops before the capture ends: %s",
                promise.capture_id,
                exc,
            )

    def _forget(self, capture_id: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / f"{capture_id}.json").unlink(missing_ok=True)

    def load(self) -> list[str]:
        """Reads the promises of the previous daemon. Blocks. Returns their captures, some of which may have ended."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                promise = FilePromise(**json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError) as exc:
                log.warning("removing %s, which cannot be used: %s", path, exc)
                path.unlink(missing_ok=True)
            else:
                self._promises[promise.capture_id] = promise
        return list(self._promises)

    def drop(self, capture_id: str) -> None:
        """Drops the promise for a capture that no longer exists."""
        self._promises.pop(capture_id, None)
        self._tasks.begin(asyncio.to_thread(self._forget, capture_id))

    async def stop(self) -> None:
        """Waits up to STOP_S for files being written; the next daemon writes the rest."""
        await self._tasks.stop(grace_s=STOP_S)


def _below(directory: Path, roots: Sequence[Path]) -> Path | None:
    """The root that contains a folder by its name, or equals it; None if there is none."""
    if ".." in directory.parts:
        return None
    return next((root for root in roots if directory.is_relative_to(root)), None)


def _opened(paths: Sequence[Path], opened: contextlib.ExitStack) -> list[int]:
    """Descriptors of files in the store. Raises OSError."""
    return [opened.enter_context(open_regular(path)).fileno() for path in paths]
