"""Starts a process that becomes the user and writes: used by the daemon and by the kinetod-writer service."""

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kinetod.supervise.child import ask_once, python

WRITER = python("kinetod.trace_writing.trace_writer")
CHECK_S = 5.0  # a folder answers at once, or hangs
WRITE_S = 120.0
FILES_AT_ONCE = 32  # descriptors passed to one writer
GRACE_S = 2.0  # the process keeps its deadline itself
MAX_FILE_BYTES = 16 << 30  # more than any trace: decoders and recorders have their own limits


class NoAnswer(Exception):
    """The process was ended at its deadline, or should have been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteQuestion:
    """What to write, as which user and where.

    uid: None checks the root only. files: descriptors and names. unit: systemd unit in which the process runs.
    """

    uid: int | None
    root: str
    parts: tuple[str, ...]
    files: tuple[tuple[int, str], ...]
    unit: str
    max_bytes: int = MAX_FILE_BYTES


async def answer(
    question: WriteQuestion, *, deadline_s: float, command: Sequence[str] = WRITER, alive: int | None = None
) -> list[str]:
    """Returns the problem of each file, or of the folder if there are no files; "" for none.

    alive: a descriptor that stays open in the process as long as it exists. Raises NoAnswer.
    """
    lines: list[bytes] = []
    asked = {**asdict(question), "deadline_s": deadline_s}
    passed = [each for each, _name in question.files] + ([] if alive is None else [alive])
    count = max(1, len(question.files))
    try:
        text = json.dumps(asked).encode()
        end = await ask_once(command, text, lines.append, deadline_s=deadline_s + GRACE_S, pass_fds=passed)
    except (OSError, ValueError) as exc:
        return [f"the writing process failed: {exc}"] * count
    if end.status in (None, -signal.SIGALRM):
        raise NoAnswer(f"the folder did not answer within {deadline_s:g} s")
    with contextlib.suppress(ValueError, IndexError):
        said = json.loads(lines[0])
        if isinstance(said, list) and len(said) == count and all(isinstance(each, str) for each in said):
            return said
    return [f"the writing process failed: exit status {end.status}: {end.errors[-300:]}"] * count
