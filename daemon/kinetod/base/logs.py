"""The daemon's log on standard error: with times for a terminal or file, with priorities for the journal.

The journal reads `<n>` at the beginning of a line as its priority and knows the time itself. Standard error is the
journal if it is the stream that JOURNAL_STREAM names (device:inode); a redirected one is not.

A record is one line: names, paths and messages from others can neither start another line nor control a terminal.
"""

import logging
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from kineto_trace.base.visible_text import one_line, visible

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JOURNAL_FORMAT = "%(name)s: %(message)s"
_CHATTY = ("grpc", "asyncio")
NOTICE = 25  # between INFO and WARNING: normal, but to be kept
_PRIORITIES = (
    (logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (NOTICE, 5), (logging.INFO, 6),
)  # fmt: skip  # syslog's
_DEBUG = 7
_GRPC = "grpc._cython.cygrpc"
_HUNG_UP = ("ExecuteBatchError", "CancelledError")  # what gRPC meets where the client of a call is gone
ERROR_PREFIX = "<3>"  # for what is written before or without logging


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


def to_journal(environ: Mapping[str, str] = os.environ, descriptor: int = 2) -> bool:
    """Whether a descriptor (default: standard error) leads to the journal."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def is_of_the_daemon(record: logging.LogRecord) -> bool:
    """False for the tracebacks that gRPC writes when a client hangs up just as its call is answered: whoever calls
    could fill the log with them, and nothing is wrong."""
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
