"""The daemon's log on standard error: with times for a terminal or file, with priorities for the journal.

The journal reads `<n>` at the beginning of a line as its priority and knows the time itself. Standard error is the
journal if it is the stream that JOURNAL_STREAM names (device:inode); a redirected one is not.

A record is one line: names, paths and messages from others can neither start another line nor control a terminal.
"""

import asyncio
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from kineto_trace.base.visible_text import one_line, visible

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JOURNAL_FORMAT = "%(name)s: %(message)s"
_CHATTY = ("grpc", "asyncio")
NOTICE = 25  # between INFO and WARNING: normal, but worth keeping
_PRIORITIES = (
    (logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (NOTICE, 5), (logging.INFO, 6),
)  # fmt: skip  # syslog's
_DEBUG = 7
_GRPC = "grpc._cython.cygrpc"
_HUNG_UP = ("ExecuteBatchError", "CancelledError")  # raised in gRPC when the client of a call is gone
ERROR_PREFIX = "<3>"  # for messages written before or without logging
INTERRUPTED = 130
PERIOD_S = 10.0
MAX_KINDS = 4096  # counted at a time; all further ones are counted together


def configure(level: str, environ: Mapping[str, str] = os.environ) -> None:
    """Sends logging to standard error; `level` is debug, info, warning or error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JournalFormatter() if to_journal(environ) else VisibleFormatter(_FORMAT))
    handler.addFilter(is_of_the_daemon)
    logging.addLevelName(NOTICE, "NOTICE")
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Changes the log level."""
    logging.getLogger().setLevel(level.upper())


def in_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def to_journal(environ: Mapping[str, str] = os.environ, descriptor: int = 2) -> bool:
    """Whether a descriptor (default: standard error) leads to the journal."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def is_of_the_daemon(record: logging.LogRecord) -> bool:
    """False for the tracebacks that gRPC writes when a client goes away just as its call is answered: callers could
    fill the log with them, and nothing is wrong.
    """
    return not (record.name == _GRPC and record.exc_info and getattr(record.exc_info[0], "__name__", "") in _HUNG_UP)


class VisibleFormatter(logging.Formatter):
    """Formats the message on one line; a traceback after it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The lines of a traceback, indented, because its message may have several lines."""
        return textwrap.indent(visible(super().formatException(ei)), "  ")


class JournalFormatter(VisibleFormatter):
    """Prefixes every line, including those of a traceback, with its priority."""

    def __init__(self) -> None:
        super().__init__(_JOURNAL_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The lines of one record."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


def exit_status(command: click.Command) -> int:
    """Runs a command with this process's arguments; returns its exit status, 2 for usage errors, 130 after Ctrl-C.

    Other exceptions of the command pass through.
    """
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except click.Abort:
        return INTERRUPTED


# Limits log lines that a caller could cause at will: the first is written, the others are counted.
# A caller that floods the daemon must not flood its audit log too: the journal would then drop the lines of others.
# The first lines of a kind from a caller are written at once. Those that follow within a period become one line at
# its end, with `count`.
@dataclass(slots=True)
class _Kind:
    line: Mapping[str, Any]
    count: int = field(default=0)
    written: int = field(default=1)


class Tally:
    """Limits repeated log lines by counting them. write: called with each line to write; burst: lines of a period."""

    def __init__(
        self, write: Callable[[Mapping[str, Any]], None], *, period_s: float = PERIOD_S, burst: int = 1
    ) -> None:
        self._write = write
        self._period_s = period_s
        self._burst = burst
        self._kinds: dict[Hashable, _Kind] = {}

    def note(self, kind: Hashable, line: Mapping[str, Any]) -> None:
        """Writes a line, or counts it with similar ones. Call it on the event loop."""
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind, line = None, {"call": "(others)", "decision": "refused"}
        if (known := self._kinds.get(kind)) is not None:
            if known.written < self._burst:
                known.written += 1
                self._write(line)
            else:
                known.count += 1
            return
        self._kinds[kind] = _Kind(line)
        self._write(line)
        asyncio.get_running_loop().call_later(self._period_s, self._due, kind)

    def _due(self, kind: Hashable) -> None:
        known = self._kinds.pop(kind, None)
        if known is not None and known.count:
            self._write({**known.line, "count": known.count})
            self._kinds[kind] = _Kind(known.line)  # it continues: further lines are counted as well
            asyncio.get_running_loop().call_later(self._period_s, self._due, kind)

    def flush(self) -> None:
        """Writes the counted lines. Call it at the end."""
        kinds, self._kinds = self._kinds, {}
        for known in kinds.values():
            if known.count:
                self._write({**known.line, "count": known.count})


def text_lines(log: logging.Logger) -> Callable[[Mapping[str, Any]], None]:
    """Writes lines with a `text`, and a `level` unless it is WARNING, to a logger."""

    def write(line: Mapping[str, Any]) -> None:
        more = f" ({line['count']} more)" if "count" in line else ""
        log.log(line.get("level", logging.WARNING), "%s%s", line.get("text", "other connections were refused"), more)

    return write
