"""The disk that captures are stored on."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kineto_trace.base.quantities import format_size

from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks.check_protocol import CheckQuestion

_SPARE = 4  # times what a capture needs to begin; less is worth a note
_FEW_FILES = 1000  # a capture takes a few dozens


def check(question: CheckQuestion) -> Iterable[Finding]:
    """Checks the disk; blocks while it does not answer."""
    return findings(question)


def findings(question: CheckQuestion) -> Iterator[Finding]:
    """One finding: whether captures can be stored."""
    name, store = "store", Path(question.store)
    free = "free space on the disk, `kinetoctl captures delete`, or shorten the retention ([store] in config.toml)"
    try:
        status = os.statvfs(store)
    except OSError as exc:
        yield Finding(name, Status.PROBLEM, f"{store}: {exc.strerror}", "check that its disk is mounted")
        return
    available, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    detail = f"{format_size(available)} of {format_size(size)} are free on the disk of {store}"
    if status.f_flag & os.ST_RDONLY or not os.access(store, os.W_OK | os.X_OK, effective_ids=True):
        yield Finding(name, Status.PROBLEM, f"{store} cannot be written", "check its owner, mode and mount")
    elif available < question.needed_bytes:
        needed = format_size(question.needed_bytes)
        yield Finding(name, Status.PROBLEM, f"{detail}: captures are refused below {needed}", free)
    elif status.f_files and status.f_favail < _FEW_FILES:
        yield Finding(name, Status.PROBLEM, f"{detail}, but there is room for only {status.f_favail} more files", free)
    elif available < _SPARE * question.needed_bytes:
        needed = format_size(question.needed_bytes)
        yield Finding(name, Status.NOTE, f"{detail}; captures are refused below {needed}", free)
    else:
        yield Finding(name, Status.OK, detail)
