"""Reads the stacks of a process by a process of its own, which may block or crash without the daemon."""

import json
import logging
import signal
from collections.abc import Sequence

from kinetod.base.fair_slots import FairSlots
from kinetod.processes.identity import ProcessKey
from kinetod.stacks.thread_stacks import NO_SUCH_PROCESS, StackReading, decode, only_reason
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.stacks.read_process")
DEADLINE_S = 10.0  # usually 0.2 s; with 5, one half were late beside a load of 30 on two processors
AT_ONCE = 8  # and one more for a user without any
_GRACE_S = 1.0  # the process ends itself at its deadline
_FAILED = "reading its stacks failed; the daemon's log has the details"


class StackReader:
    """Starts one process for each question, at most AT_ONCE, in turns by user."""

    def __init__(self, *, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S) -> None:
        self._command = command
        self._deadline_s = deadline_s
        self._slots = FairSlots(AT_ONCE, spare=1)

    async def read(self, key: ProcessKey, uid: int) -> StackReading:
        """The stacks of a process of this user. Raises ProcessLookupError if it does not exist."""
        pid = key.pid
        question = json.dumps({"pid": pid, "uid": uid, "deadline_s": self._deadline_s}).encode()
        answers = list[bytes]()

        def keep(line: bytes) -> None:
            if line.endswith(b"\n"):  # else it was ended while it wrote
                answers[:] = [line]

        async with self._slots.turn():
            try:
                ended = await child.ask_once(self._command, question, keep, deadline_s=self._deadline_s + _GRACE_S)
            except (OSError, ValueError) as exc:
                ended = child.ProcessEnd(status=1, errors=str(exc))
        if ended.status == NO_SUCH_PROCESS:
            raise ProcessLookupError(ended.errors)
        late = ended.status in (None, -signal.SIGALRM)
        failed = not late and ended.status != 0
        if failed:
            log.error("reading the stacks of process %d ended with status %s: %s", pid, ended.status, ended.errors)
        try:
            read = decode(answers[0])
        except (IndexError, ValueError):
            return only_reason("its stacks could not be read in time" if late else _FAILED)
        if failed:
            read.reason = "reading its Python frames failed; the daemon's log has the details"
        return read
