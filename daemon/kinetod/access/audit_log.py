"""The audit log: one JSON object per line for each request, to a file of its own or to the journal.

Theory of operation
    `write` never blocks: a thread writes the lines to the file in order, with at most MAX_WAITING queued. Without a
    file they go through logging, to the journal (priority notice) or standard error; so does a line that cannot be
    written to the file as a whole, so that none is lost without a trace, and no call waits for a full disk. The file is
    reopened at each reload (SIGHUP), as logrotate needs, is accessible to its owner only, and is never opened through a
    link. The file that is written where none is configured, in the folder that systemd gives, is kept short here: the
    journal is no place for it, where others' lines can push it out.
"""

import contextlib
import itertools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kinetod.base.errors import StartError
from kinetod.base.logs import NOTICE
from kinetod.base.safe_text import clean
from kinetod.permissions.role_policy import Caller

log = logging.getLogger("kinetod.audit")

MAX_WAITING = 10_000
MAX_TEXT_CHARS = 500
MAX_FILE_BYTES, KEPT_FILES = 64 << 20, 4
_REOPEN = object()
_END = object()


class AuditLog:
    """Writes the audit log. Call `close` at the end."""

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], int] = time.time_ns,
        *,
        state_dir: Path | None = None,
        max_bytes: int = 0,
    ) -> None:
        """Opens the file. Blocks. Raises StartError.

        state_dir: systemd's, for where there is no path; max_bytes: of that file before it is moved away.
        """
        self._clock = clock
        self._max_bytes = 0
        if path is None and state_dir is not None:
            path, self._max_bytes = state_dir / "audit.jsonl", max_bytes or MAX_FILE_BYTES
        self._path = path
        self._queue: queue.Queue[Any] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        log.setLevel(NOTICE)  # whatever the level of other loggers
        if path is not None:
            try:
                file = _opened(path)
            except OSError as exc:
                raise StartError(f"the audit log {path} cannot be written: {exc.strerror}") from exc
            self._thread = threading.Thread(target=self._write_lines, args=(file,), name="audit", daemon=True)
            self._thread.start()

    def write(self, call: str, decision: str, caller: Caller | None, /, **facts: Any) -> None:
        """Writes one line. decision: allowed, denied, refused or how the call ended; empty facts are left out."""
        now_ns = self._clock()
        line = json.dumps(
            {"time_ns": now_ns, "call": call, "decision": decision, **_who(caller), **_shown(facts)},
            separators=(",", ":"),
        )
        if self._thread is None:
            log.log(NOTICE, "%s", line)
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            log.log(NOTICE, "%s", line)

    def reopen(self) -> None:
        """Reopens the file, which may have been moved away."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(_REOPEN)

    def close(self) -> None:
        """Writes the queued lines. Blocks."""
        if self._thread is not None:
            self._queue.put(_END)
            self._thread.join()
            self._thread = None

    def _write_lines(self, file: int) -> None:
        failing = False
        while (line := self._queue.get()) is not _END:
            if line is _REOPEN:
                file = self._reopened(file)
                continue
            try:
                _write_all(file, line.encode() + b"\n")
                if self._max_bytes and os.fstat(file).st_size >= self._max_bytes:
                    file = self._moved_away(file)
                failing = False
            except OSError as exc:
                if not failing:
                    why = "cannot be written: %s; its lines go to this log until it can be written again"
                    log.error(f"the audit log %s {why}", self._path, exc.strerror)
                failing = True
                log.log(NOTICE, "%s", line)
        os.close(file)

    def _moved_away(self, file: int) -> int:
        """Raises OSError before anything is moved if there can be no new file."""
        assert self._path is not None
        fresh = self._path.with_name(f"{self._path.name}.new")
        os.close(_opened(fresh))
        older_ones = (self._path.with_name(f"{self._path.name}.{number}") for number in range(1, KEPT_FILES))
        names = [fresh, self._path, *older_ones]
        for newer, older in reversed(list(itertools.pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        return self._reopened(file)

    def _reopened(self, old: int) -> int:
        assert self._path is not None
        try:
            new = _opened(self._path)
        except OSError as exc:
            log.error(
                "the audit log %s cannot be reopened; lines still go to the old file: %s", self._path, exc.strerror
            )
            return old
        os.close(old)
        return new


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _write_all(file: int, data: bytes) -> None:
    """Writes all or nothing. Raises OSError."""
    rest = data
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        if len(rest) < len(data):  # otherwise the next line would continue in half of this one
            os.ftruncate(file, os.fstat(file).st_size - len(data) + len(rest))
        raise


def _who(caller: Caller | None) -> dict[str, Any]:
    if caller is None:
        return {}
    who: dict[str, Any] = {"via": str(caller.via), "uid": caller.uid, "user": caller.user, "pid": caller.pid}
    who |= {"certificate": caller.name, "address": caller.address, "roles": sorted(map(str, caller.roles))}
    who |= {"proxy": proxy_facts(caller.proxy)}
    return {name: value for name, value in who.items() if value not in ("", None)}


def proxy_facts(caller: Caller | None) -> dict[str, Any] | None:
    """The facts about the web front end that called for the caller; None if none did."""
    if caller is None:
        return None
    who = {"uid": caller.uid, "user": caller.user, "pid": caller.pid, "certificate": caller.name}
    return {name: value for name, value in who.items() if value not in ("", None)}


def _shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    shown = {}
    for name, value in facts.items():
        if value not in ("", None, [], {}):
            shown[name] = clean(value, MAX_TEXT_CHARS) if isinstance(value, str) else value
    return shown
