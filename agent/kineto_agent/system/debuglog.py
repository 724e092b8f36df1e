"""The debug log: one line per event in the file named by KINETO_AGENT_LOG, and nowhere else.

The file is opened for each line: so the agent holds no descriptor that the program could close or inherit, and a
rotated log continues in the new file. Never raises, never prints.
"""

import os
import sys
import time
from typing import Any

from kineto_agent.system import env

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_LINE_CHARS = 4000


def log(text: str, *values: object) -> None:
    """Append one line, `text % values`."""
    path = os.environ.get(env.AGENT_LOG)
    if not path:
        return
    try:
        if env.is_elevated():
            return
        seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        message = (text % values if values else text)[:_MAX_LINE_CHARS]
        line = "%s.%06dZ kineto-agent[%d] %s\n" % (stamp, nanoseconds // 1000, os.getpid(), message)
        descriptor = os.open(path, _FLAGS, 0o600)
        try:
            os.write(descriptor, line.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)
    except Exception:  # noqa: BLE001, S110 - a log that cannot be written must not harm the traced program
        pass


def log_exception(what: str) -> None:
    """Append the exception being handled, its place, and its causes.

    Does not use the module traceback, which imports more and reads files: the thread may belong to the program.
    """
    if os.environ.get(env.AGENT_LOG):
        exc: Any = sys.exc_info()[1]
        while exc is not None:
            log("%s: %s: %s%s", what, type(exc).__name__, exc, _places(exc.__traceback__))
            exc, what = exc.__cause__ or exc.__context__, "caused by"


def _places(trace: Any) -> str:
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        found += "\n  %s:%d in %s" % (code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found
