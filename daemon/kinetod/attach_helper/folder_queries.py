"""Queries about the folder in which a process's libkineto writes a trace; a helper process answers them.

A query that enters the process's folder is {"do": FOLDER, "step": MAKE, TRY or REOPEN, "pid", "start_time_ns",
"boot_time_ns", "uid", "until_s" or "name"}; the answers to MAKE and REOPEN carry the descriptor of our own folder. It
is sent with each later query, {"do": FOLDER, "step": LOOK, OPEN or REMOVE, "uid", "file", "name"}, when the process may
have ended. An answer with "problem" says why something cannot be done.
"""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kinetod.attach.inspect.process_inspection import read_file
from kinetod.kineto_files import own_folder
from kinetod.kineto_files.interface import FileRefused, FolderUnreachable, trace_folder
from kinetod.kineto_files.trace_folder import TraceFolder, mount_id
from kinetod.processes.identity import PROC, ProcessKey

FOLDER = "folder"
MAKE, TRY, REOPEN, LOOK, OPEN, REMOVE = "make", "try", "reopen", "look", "open", "remove"
NOTHING = "nothing"  # an answer to it shows that the helper has started
_MAX_MOUNTS_BYTES = 4 << 20
_AGENT = "let kinetod's agent record (--recorder agent)"
_ELSEWHERE = "set KINETO_ONDEMAND_TRACE_DIR in the process's environment to a folder that"

Answered = tuple[dict[str, Any], int | None]


def answer(question: Mapping[str, Any], descriptor: int | None, proc: Path = PROC) -> Answered:
    """Returns the answer and its descriptor, which the caller owns. Raises ValueError for an invalid query."""
    try:
        if question["step"] in (MAKE, TRY, REOPEN):
            return _enter(question, proc)
        if question["step"] == NOTHING:
            return {}, None
        if descriptor is None:
            raise ValueError("the folder's descriptor is missing")
        return _inside(question, descriptor)
    except FolderUnreachable as exc:
        return {"problem": str(exc)}, None
    except OSError as exc:
        return {"problem": exc.strerror or str(exc)}, None  # the caller adds the place


def _enter(question: Mapping[str, Any], proc: Path) -> Answered:
    pid, uid, step = int(question["pid"]), int(question["uid"]), question["step"]
    key = ProcessKey(pid, int(question["start_time_ns"]))
    where = trace_folder(pid, proc)
    check = _answering(pid, where, proc)
    outer = TraceFolder.open(key, where, uid, proc, boot_time_ns=int(question["boot_time_ns"]), check=check)
    try:
        if step == REOPEN:
            name = str(question["name"])
            try:
                return {"path": f"{where}/{name}"}, own_folder.reopen(outer.descriptor, name)
            except OSError as exc:
                raise FolderUnreachable(f"{where}/{name} of process {pid}: {exc.strerror}") from exc
        own_folder.sweep(outer.descriptor, time.time())
        try:
            name, made = own_folder.make(outer.descriptor, uid, int(question["until_s"]))
        except OSError as exc:
            raise FolderUnreachable(_why_not_made(pid, where, exc)) from exc
        if step == MAKE:
            return {"path": f"{where}/{name}"}, made
        try:
            own_folder.remove(made, name)
        finally:
            os.close(made)
        return {"path": f"{where}/{name}"}, None
    finally:
        outer.close()


def _inside(question: Mapping[str, Any], descriptor: int) -> Answered:
    step, file = question["step"], str(question["file"])
    folder = TraceFolder(descriptor, int(question["uid"]))
    if step == LOOK:
        sight = folder.look(file)
        return {"writing_bytes": sight.writing_bytes, "whole": sight.whole}, None
    if step == OPEN:
        try:
            return {"refused": ""}, folder.open_file(file)
        except FileRefused as exc:
            return {"refused": str(exc)}, None
    if step == REMOVE:
        folder.remove(file)
        own_folder.remove(descriptor, str(question["name"]))
        return {}, None
    raise ValueError(f"not a step: {step!r}")


def _answering(pid: int, where: str, proc: Path) -> Callable[[int], None]:
    """Returns a check that refuses folders served by a user's program, which could make the helper wait forever."""
    types = _mount_types(pid, proc)

    def check(descriptor: int) -> None:
        found = types.get(mount_id(descriptor), "")
        if found == "fuse" or found.startswith("fuse."):
            raise FolderUnreachable(
                f"{where} of process {pid}, where its libkineto writes, is on a FUSE file system ({found}), which the "
                f"attach helper does not access; {_ELSEWHERE} is on another file system, or {_AGENT}"
            )

    return check


def _mount_types(pid: int, proc: Path) -> dict[int, str]:
    types = {}
    for line in read_file(proc / str(pid) / "mountinfo", _MAX_MOUNTS_BYTES).decode("utf-8", "replace").splitlines():
        head, _, tail = line.partition(" - ")
        if tail:
            types[int(head.split()[0])] = tail.split()[0]
    return types


def _why_not_made(pid: int, where: str, exc: OSError) -> str:
    what = f"{where} of process {pid}, where its libkineto writes,"
    if exc.errno == errno.EOVERFLOW:
        return (
            f"{what} is in a user namespace that does not map the attach helper's user (uid {os.geteuid()}), so the "
            f"helper cannot create a folder there; {_AGENT}, or run a daemon as the process's own user"
        )
    if exc.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{what} is not writable by the attach helper's user (uid {os.geteuid()}); {_ELSEWHERE} everybody can "
            f"write to (chmod 1777), or {_AGENT}"
        )
    if exc.errno == errno.EROFS:
        return f"{what} is read-only; {_ELSEWHERE} is writable, or {_AGENT}"
    return f"the attach helper cannot create a folder in {what.removesuffix(',')}: {exc.strerror or exc}; {_AGENT}"
