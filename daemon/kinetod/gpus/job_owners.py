"""Which batch jobs have which GPU, by a folder that the cluster's prolog and epilog keep.

The form is that of dcgm-exporter (--hpc-job-mapping-dir), so that one folder serves both: a file for each GPU, named by
its index, `INDEX.SLICE` for a part of it, or its UUID; in it the ids of the jobs that were given it, one a line.

Only the cluster knows that: a job that holds a GPU and does not use it has no process there.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuState
from kinetod.supervise.thread_deadline import WithinDeadline

DEADLINE_S = 0.2  # the folder may be on a network
MAX_FILES = 1024
MAX_BYTES = 1 << 14
MAX_JOBS = 64
_MAX_ID_CHARS = 128

Jobs = Mapping[str, tuple[str, ...]]  # by the name of the GPU's file


class JobFolder:
    """Called: what the folder says now; nothing where there is none, or it hangs. Thread-safe."""

    def __init__(self, folder: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self._folder = folder
        self._deadline_s = deadline_s
        self._reading = WithinDeadline("jobs of GPUs", self._read)

    def __call__(self) -> Jobs:
        """The jobs by the names of the GPUs' files."""
        with contextlib.suppress(OSError, TimeoutError):
            return self._reading.get(self._deadline_s)
        return {}

    def _read(self) -> Jobs:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MAX_FILES), strict=False)]
        return {name: jobs for name in names if (jobs := _jobs_in(self._folder / name))}


def jobs_of(gpu: GpuState, jobs: Jobs) -> list[str]:
    """The jobs that have the GPU or a part of it."""
    names = [name for name in jobs if gpu.uuid == name or str(gpu.index) == name.partition(".")[0]]
    return sorted({job for name in names for job in jobs[name]})


def _jobs_in(path: Path) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, MAX_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        finally:
            os.close(descriptor)
        ids = (clean(line, _MAX_ID_CHARS) for line in text.decode("utf-8", "replace").splitlines() if line.strip())
        return tuple(dict.fromkeys(ids))[:MAX_JOBS]
    return ()
