"""Detects whether a whole process, or the agent's thread in it, is stopped, so that injected code does not run."""

import contextlib
import os
from pathlib import Path, PurePosixPath

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inspect.process_inspection import read_status
from kinetod.attach.inspect.target_image import read_maps
from kinetod.processes.cgroups import frozen_by
from kinetod.processes.identity import PROC

D_STATE = "it is blocked in the kernel (state D) by a device or a network file system and cannot be interrupted"
D_STATE_ADVICE = "try again; if it stays in that state, check the device"
_AGENT = "kineto-agent"  # name of its thread
# System call numbers: read, stat, openat and newfstatat; and futex.
_FILE_CALLS, _FUTEX = {"x86_64": ({0, 4, 257, 262}, 202)}.get(os.uname().machine, ({63, 56, 79}, 98))


def stopped(pid: int) -> tuple[str, str]:
    """Returns detail and advice for a process that job control has stopped."""
    return "it is stopped (SIGSTOP or Ctrl-Z)", f"resume it: kill -CONT {pid}"


def frozen(file: str) -> tuple[str, str]:
    """Returns detail and advice for a process that a control group freezes through that file."""
    thaw = f"`echo {'THAWED' if file.endswith('freezer.state') else '0'} > {file}`"
    return "its control group is frozen", f"thaw it: {thaw}, or `docker unpause` if Docker paused it"


def check(pid: int, proc: Path = PROC) -> None:
    """Raises AttachError if the process is stopped or frozen. Reads nothing that a process could block."""
    state = read_status(proc / str(pid)).get("State", "?")[:1]
    file = frozen_by(pid, proc) if state in "SD" else ""  # a frozen process is in state D in version 1, S in version 2
    if state == "T":
        what, advice = stopped(pid)
    elif file:
        what, advice = frozen(file)
    else:
        return
    raise AttachError(AttachCode.UNSUITABLE, f"process {pid} cannot be attached to: {what}; {advice}")


def delay(pid: int, proc: Path = PROC) -> str | None:
    """Explains what the agent's starting thread waits for without the GIL; "" if no known reason applies.

    None if it runs, or waits for a processor.
    """
    for task in (proc / str(pid) / "task").glob("*"):
        with contextlib.suppress(OSError, ValueError, AttachError):  # it has ended, or runs
            if (task / "comm").read_text().rstrip("\n") != _AGENT:
                continue
            words = (task / "syscall").read_text().split()
            if words[:1] == ["running"]:
                return None
            number, argument = (int(word, 0) for word in words[:2])
            if number in _FILE_CALLS:
                return "a file of Python's standard library, whose file system is not responding"
            files = [each.path for each in read_maps(pid, proc) if each.start <= argument < each.end]
            if number == _FUTEX and files and PurePosixPath(files[0]).name.startswith("ld"):
                return "the dynamic loader: another thread of the process was already loading a library (dlopen)"
    return ""
