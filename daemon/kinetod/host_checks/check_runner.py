"""Runs the checks of the host in a separate process: if one hangs or crashes, the daemon continues."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from kinetod.attach.attach_types import Finding, Status
from kinetod.base.safe_text import clean
from kinetod.host_checks.check_protocol import CheckQuestion, Line, unpacked
from kinetod.profilers import Profiling, ProfilingTool, Scan
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.host_checks.check_process")
DEADLINE_S = 15.0  # usually 0.4 s
MAX_AGE_S = 1.0  # however often it is called


@dataclass(frozen=True, slots=True)
class Looked:
    """What the checks found by the deadline. scan: None if it was not reached."""

    findings: tuple[Finding, ...]
    scan: Scan | None = None
    dcgm: tuple[Profiling, str] | None = None


class Searcher(Protocol):
    """Searches processes that the check process may not read: the attach helper service."""

    async def profilers(self, pids: Iterable[int]) -> tuple[set[int], list[ProfilingTool]]:
        """Returns the processes that it has searched, and the tools in them."""


class HostLooker:
    """Runs one process at a time; callers in the meantime, or within MAX_AGE_S, get the same answer.

    helper: searches for other profilers in processes that may not be read here; None: these are found by name only.
    """

    def __init__(
        self, *, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S, helper: Searcher | None = None
    ) -> None:
        self._command = command
        self._deadline_s = deadline_s
        self._helper = helper
        self._lock = asyncio.Lock()
        self._last: tuple[float, CheckQuestion, Looked] | None = None  # with the time by the loop's clock

    async def look(self, question: CheckQuestion) -> Looked:
        """Runs the checks that fit into the deadline; one that hangs or crashes becomes a finding itself."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._last is not None and self._last[1] == question and loop.time() - self._last[0] <= MAX_AGE_S:
                return self._last[2]
            give_up_at = loop.time() + self._deadline_s
            looked = await self._searched(await self._look(question), give_up_at)
            self._last = (loop.time(), question, looked)
            return looked

    async def _searched(self, looked: Looked, give_up_at: float) -> Looked:
        """Adds the helper's findings up to that time."""
        if self._helper is None or looked.scan is None or not looked.scan.hidden:
            return looked
        try:
            async with asyncio.timeout_at(give_up_at):
                searched, found = await self._helper.profilers(looked.scan.hidden)
        except TimeoutError:
            log.warning("the attach helper did not report in time which profilers are in other users' processes")
            return looked
        return replace(looked, scan=looked.scan.joined(searched, found))

    async def _look(self, question: CheckQuestion) -> Looked:
        lines: list[Line] = []

        def take(line: bytes) -> None:
            lines.append(msgspec.json.decode(line, type=Line))

        why = ""
        try:
            asked = msgspec.json.encode(question)
            ended = await child.ask_once(self._command, asked, take, deadline_s=self._deadline_s)
        except OSError as exc:
            return Looked((_not_made("host", f"the check process cannot be started: {exc.strerror}"),))
        except ValueError as exc:
            why = f"the check process sent an invalid answer: {clean(str(exc), 200)}"
        else:
            if ended.status is None:
                why = f"the check process did not finish within {self._deadline_s:g} s"
                log.warning("checking the host failed at %s: %s", lines[-1].next if lines else "the start", why)
            elif ended.status:
                why = f"the check process failed (exit status {ended.status}); see the daemon's log"
                log.error("checking the host failed: %s", ended.errors)
        return _joined(lines, why)


def _joined(lines: Sequence[Line], why: str) -> Looked:
    findings: list[Finding] = []
    for line in lines:
        findings += unpacked(line.findings)
    last = lines[-1] if lines else Line(next="host")
    if why or last.next:
        findings.append(_not_made(last.next or "host", why or "the check process ended early"))
    return Looked(tuple(findings), last.scan, last.dcgm)


def _not_made(name: str, why: str) -> Finding:
    return Finding(name, Status.UNKNOWN, f"this check and those after it were not run: {why}")
