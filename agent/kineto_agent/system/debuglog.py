"""The debug log: one line per event in the file that KINETO_AGENT_LOG names, nothing anywhere else.

The file is opened for each line: so the agent holds no descriptor that the program could close or inherit, and a
rotated log continues in the new file. Never raises, never prints.
"""

import os
import time

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
    """Append what went wrong with the traceback of the exception being handled."""
    if os.environ.get(env.AGENT_LOG):
        import traceback  # importing it at start-up would take 2 ms

        log("%s: %s", what, traceback.format_exc())
