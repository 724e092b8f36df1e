"""Audit lines of the attach helper: caller, request, target process and its owner, result."""

import contextlib
import logging
import time
from dataclasses import dataclass

from kinetod.attach_helper import messages
from kinetod.base.safe_text import clean
from kinetod.processes import credentials
from kinetod.processes.identity import PROC


@dataclass(slots=True)
class _Looks:
    """How many processes one connection asked about, and how many were inspected."""

    asked: int = 0
    seen: int = 0


class RequestLog:
    """The log of one connection."""

    def __init__(self, log: logging.Logger, caller_pid: int, caller: str) -> None:
        self._log = log
        self._caller_pid = caller_pid
        self._caller = caller
        self._looks: dict[str, _Looks] = {}

    def answered(self, asked: messages.Request, said: messages.Answer, began: float) -> None:
        """Logs a request and its answer. began: monotonic."""
        self.note(asked, _result(said), began, seen=_seen(said))

    def note(self, asked: messages.Request, result: str, began: float, *, seen: int = 0) -> None:
        """Logs a request and its result. seen: how many processes were inspected."""
        kind = type(asked).__name__.lower()
        if isinstance(asked, messages.Look | messages.Search):
            looks = self._looks.setdefault(kind, _Looks())
            # a caller that asks about itself only checks whether the service answers
            looks.asked += sum(target.pid != self._caller_pid for target in asked.targets)
            looks.seen += seen
            return
        took_ms = (time.monotonic() - began) * 1000
        if isinstance(asked, messages.Kubelet | messages.OpenPollSocket):  # they concern no process
            self._log.debug("%s by %s: %s in %.0f ms", kind, self._caller, result, took_ms)
            return
        level = logging.INFO if not result.startswith("refused") else logging.WARNING
        if isinstance(asked, messages.LookIntoFolder):  # the folder's creation and removal have a line each
            level = logging.DEBUG
        whose = _describe(asked.target.pid)
        self._log.log(
            level,
            "%s by %s to process %d (%s): %s in %.0f ms",
            kind, self._caller, asked.target.pid, whose, result, took_ms,
        )  # fmt: skip

    def end(self) -> None:
        """Logs the inspections: once, since a list of processes takes many requests."""
        for kind, looks in self._looks.items():
            if looks.asked:
                self._log.info("%s by %s: %d of %d processes seen", kind, self._caller, looks.seen, looks.asked)


def _result(said: messages.Answer) -> str:
    if isinstance(said, messages.RefusedReply):
        return f"refused {said.code}: {clean(said.reason, 500)}"
    if isinstance(said, messages.PollSockets) and said.namespace:
        return f"network namespace {said.namespace}: {said.problem or 'opened'}"
    if isinstance(said, messages.FolderMade):
        return f"made {clean(said.path, 600)}"
    if isinstance(said, messages.TraceFileReply) and said.refused:
        return f"refused the file: {clean(said.refused, 500)}"
    if isinstance(said, messages.AttachReply):
        return f"done by {said.method}, one thread was stopped for {said.stopped_ns / 1e6:.2f} ms"
    return "done"


def _seen(said: messages.Answer) -> int:
    if isinstance(said, messages.Seen):
        return len(said.facts)
    return len(said.searched) if isinstance(said, messages.Found) else 0


def _describe(pid: int) -> str:
    """Owner and name of a process, for the log."""
    with contextlib.suppress(OSError, IndexError):
        name = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        return f"uid {credentials.read(pid).uid}, {clean(name, 32)}"
    return "ended"
