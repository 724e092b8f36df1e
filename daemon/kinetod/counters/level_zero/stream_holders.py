"""Who streams metrics of Intel's GPUs: a stream is an open file of a process, which its name in /proc tells. Blocking.

Of which GPU it is, the name does not tell; other users' files are seen with the right to trace them only.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.processes.drm_gpus import PROC

STREAMS = frozenset(("anon_inode:[i915_perf]", "anon_inode:[xe_oa]"))  # of i915_perf.c and xe_oa.c in the kernel


def stream_holder(proc: Path = PROC) -> str:
    """A name such as "unitrace (process 1234)"; empty if none is seen. This process's own streams do not count."""
    own = str(os.getpid())
    for folder in proc.glob("[0-9]*"):
        if folder.name != own and any(target in STREAMS for target in _open_files(folder)):
            return f"{_name(folder)} (process {folder.name})"
    return ""


def _open_files(folder: Path) -> Iterator[str]:
    try:
        files = list((folder / "fd").iterdir())
    except OSError:
        return
    for file in files:
        try:
            yield str(file.readlink())
        except OSError:
            continue


def _name(folder: Path) -> str:
    try:
        return clean((folder / "comm").read_text(errors="replace").strip(), 64) or "a process"
    except OSError:
        return "a process"
