"""Whether a process stands still as a whole, so that nothing which is handed to it runs."""

from pathlib import Path

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inspect.process_inspection import read_status
from kinetod.processes.cgroups import frozen_by
from kinetod.processes.identity import PROC

D_STATE = "it is blocked in the kernel (state D) and cannot be interrupted: by a device or a network file system"
D_STATE_ADVICE = "try again; if it stays in that state, check the device"


def stopped(pid: int) -> tuple[str, str]:
    """Detail and advice for a process that job control has stopped."""
    return "it is stopped (SIGSTOP or Ctrl-Z)", f"resume it: kill -CONT {pid}"


def frozen(file: str) -> tuple[str, str]:
    """The same of one that a control group freezes, by that file."""
    thaw = f"`echo {'THAWED' if file.endswith('freezer.state') else '0'} > {file}`"
    return "its control group is frozen", f"thaw it: {thaw}, or `docker unpause` if Docker paused it"


def check(pid: int, proc: Path = PROC) -> None:
    """Raises AttachError if the process is stopped or frozen. Reads nothing that a process could block."""
    state = read_status(proc / str(pid)).get("State", "?")[:1]
    file = frozen_by(pid, proc) if state in "SD" else ""  # a frozen one is D in version 1, S in version 2
    if state == "T":
        what, advice = stopped(pid)
    elif file:
        what, advice = frozen(file)
    else:
        return
    raise AttachError(AttachCode.UNSUITABLE, f"process {pid} cannot be attached to: {what}; {advice}")
