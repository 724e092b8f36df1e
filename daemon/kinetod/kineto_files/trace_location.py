"""Where a process's libkineto may write, and under which pid: read from the process itself."""

from pathlib import Path, PurePosixPath

from kinetod.attach.inspect.process_inspection import environment, read_status
from kinetod.kineto_ipc.libkineto_variables import TRACE_DIR
from kinetod.processes.identity import PROC

DEFAULT_FOLDER = "/tmp"  # libkineto's: from torch 2.14 on it writes nowhere else
MAX_FOLDER_CHARS = 512


def trace_folder(pid: int, proc: Path = PROC) -> str:
    """The folder that libkineto of this process may write to, as the process sees it; it takes the right to look."""
    wanted = (environment(pid, proc) or {}).get(TRACE_DIR, "").rstrip("/")
    path = PurePosixPath(wanted)
    usable = path.is_absolute() and ".." not in path.parts and not set("=#") & set(wanted)
    if usable and str(path) == wanted and wanted.isprintable() and wanted.isascii() and len(wanted) < MAX_FOLDER_CHARS:
        return wanted
    return DEFAULT_FOLDER


def own_pid(pid: int, proc: Path = PROC) -> int:
    """The pid of a process in its own PID namespace; the same number if that is not known."""
    numbers = read_status(proc / str(pid)).get("NSpid", "").split()
    return int(numbers[-1]) if numbers and numbers[-1].isdecimal() else pid
