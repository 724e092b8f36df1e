"""Why the collection in a target ended, kept beside its records while these are decoded.

Decoding takes seconds. A daemon that is stopped or killed in the middle of it leaves the rest to the next one, which
would not know what had ended the collection.
"""

import contextlib
import logging
from pathlib import Path

import msgspec
from kineto_trace.base.atomic_files import write_atomically

from kinetod.base.errors import VerdictReason
from kinetod.base.safe_text import clean, clean_code
from kinetod.captures.result.verdict import DONE, REASON_CHARS, Ending, EndState

log = logging.getLogger(__name__)

_NAME = "ending.json"
_MAX_BYTES = 16 << 10


class NotedEnding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """dropped: records that were lost because the buffers were full."""

    outcome: EndState
    code: str
    reason: str
    dropped: int

    def ending(self) -> Ending:
        """The ending that was noted."""
        if self.outcome is EndState.DONE:
            return DONE
        return Ending(
            self.outcome, clean_code(self.code, VerdictReason.DAEMON_RESTARTED), clean(self.reason, REASON_CHARS)
        )


_DECODER = msgspec.json.Decoder(NotedEnding)


def note(directory: Path, ending: Ending, dropped: int) -> None:
    """Keeps the first one. Without room on the disk, and without records, there is none."""
    file = directory / "raw" / _NAME
    known = NotedEnding(outcome=ending.outcome, code=ending.code, reason=ending.reason, dropped=dropped)
    with contextlib.suppress(OSError):
        if not file.exists():
            write_atomically(file, msgspec.json.encode(known))


def noted(directory: Path) -> NotedEnding | None:
    """What was noted; None if nothing was, or it cannot be read."""
    try:
        with (directory / "raw" / _NAME).open("rb") as file:
            return _DECODER.decode(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as exc:
        log.warning("%s: %s", directory, exc)
        return None
