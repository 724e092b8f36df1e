"""A control group for processor time, as a service manager makes one for each service and for users' programs."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class CpuGroup:
    """For processes that share one part of the processors, however many they are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, pids: Iterable[int]) -> None:
        """Moves processes here; one that has ended is left out."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self._path / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float, period_ms: int) -> None:
        """Limits the group as CPUQuota= and CPUQuotaPeriodSec= do."""
        period_us = period_ms * 1000
        if (self._path / "cpu.cfs_quota_us").exists():
            (self._path / "cpu.cfs_period_us").write_text(str(period_us))
            (self._path / "cpu.cfs_quota_us").write_text(str(int(cores * period_us)))
        else:
            (self._path / "cpu.max").write_text(f"{int(cores * period_us)} {period_us}")


@contextlib.contextmanager
def cpu_group(name: str, root: Path = ROOT) -> Iterator[CpuGroup]:
    """A new one at the top, removed once its processes have ended. Raises OSError where that is not allowed."""
    if not (root / "cpu").is_dir():  # the unified hierarchy
        (root / "cgroup.subtree_control").write_text("+cpu")
    path = (root / "cpu" if (root / "cpu").is_dir() else root) / name
    path.mkdir()
    try:
        yield CpuGroup(path)
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
