"""Chooses where a process's libkineto is to write, and tells under which name its file will be there."""

import secrets
from pathlib import Path, PurePosixPath

from kinetod.attach.inspect.process_inspection import environment, read_status
from kinetod.captures.kineto_target.config_text import TraceDestination
from kinetod.kineto_ipc.libkineto_variables import TRACE_DIR
from kinetod.processes.identity import PROC

DEFAULT_FOLDER = "/tmp"  # libkineto's: from torch 2.14 on it writes nowhere else
_ID_BITS = 63  # libkineto keeps the number as text, readers of JSON as int64
_MAX_FOLDER_CHARS = 512


def new_destination(pid: int, capture_id: str, proc: Path = PROC) -> TraceDestination:
    """A file whose name nobody can guess: others may write into the folder, too, and could put a link there first."""
    trace_id = secrets.randbits(_ID_BITS)
    stem = f"kinetod-{capture_id}-{secrets.token_hex(8)}"
    return TraceDestination(folder=trace_folder(pid, proc), stem=stem, trace_id=trace_id)


def trace_folder(pid: int, proc: Path = PROC) -> str:
    """The folder that libkineto of this process may write to, as the process sees it."""
    wanted = (environment(pid, proc) or {}).get(TRACE_DIR, "").rstrip("/")
    path = PurePosixPath(wanted)
    usable = path.is_absolute() and ".." not in path.parts and not set("=#") & set(wanted)
    if usable and str(path) == wanted and wanted.isprintable() and wanted.isascii() and len(wanted) < _MAX_FOLDER_CHARS:
        return wanted
    return DEFAULT_FOLDER


def own_pid(pid: int, proc: Path = PROC) -> int:
    """The pid of a process in its own PID namespace; the same number if that is not known."""
    numbers = read_status(proc / str(pid)).get("NSpid", "").split()
    return int(numbers[-1]) if numbers and numbers[-1].isdecimal() else pid
