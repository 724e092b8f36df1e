"""Inspects a target in a separate process: if that blocks or crashes, the daemon continues."""

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

from kinetod.attach.attach_types import AttachCode, Finding, Status
from kinetod.attach_helper.diagnosis import Diagnosis, KnownAgent, decode
from kinetod.base.fair_slots import FairSlots
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.attach_helper.diagnosis")
DEADLINE_S = 10.0  # usually 0.15 s
AT_ONCE = 4  # and one more for a user without any
_NO_SUCH_PROCESS = 3


class DiagnosisProcess:
    """Starts one process for each question, at most AT_ONCE, in turns by user."""

    def __init__(self, *, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S) -> None:
        self._command = command
        self._deadline_s = deadline_s
        self._slots = FairSlots(AT_ONCE, spare=1)

    async def diagnose(self, pid: int, agent: KnownAgent) -> Diagnosis:
        """Inspects a process. Raises ProcessLookupError if it does not exist."""
        question = json.dumps({"pid": pid, "agent": asdict(agent)}).encode()
        answer, ended = bytearray(), child.ProcessEnd(status=0, errors="a line of its answer is too long")
        async with self._slots.turn():
            with contextlib.suppress(ValueError):
                ended = await child.ask_once(self._command, question, answer.extend, deadline_s=self._deadline_s)
        if ended.status is None:
            log.warning("inspecting process %d took longer than %g s", pid, self._deadline_s)
            slow = "a file that it has mapped may be on a file system that is not responding"
            return _no_answer(f"inspecting it took longer than {self._deadline_s:g} s: {slow}")
        if ended.status == _NO_SUCH_PROCESS:
            raise ProcessLookupError(ended.errors)
        try:
            return decode(answer)
        except ValueError:
            log.error("inspecting process %d failed with exit status %s: %s", pid, ended.status, ended.errors)
            return _no_answer("inspecting it failed; the daemon's log has the details")


def _no_answer(why: str) -> Diagnosis:
    return Diagnosis(method="", findings=(Finding("process", Status.PROBLEM, why, "", AttachCode.FAILED),))
