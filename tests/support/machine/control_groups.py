"""Control groups for what processes share, as a service manager makes one for each service and for users' programs.

Both hierarchies of the kernel: one for each controller (version 1), or one for all (version 2).
"""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_FIRST_VERSION = {"io": "blkio"}  # other controllers have the same name in both


class ControlGroup:
    """For processes that share one part of something, however many they are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pids: Iterable[int]) -> None:
        """Moves processes here; one that has ended is left out."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self.path / "cgroup.procs").write_text(str(pid))


class CpuGroup(ControlGroup):
    """A part of the processors."""

    def limit(self, cores: float, period_ms: int) -> None:
        """Limits the group as CPUQuota= and CPUQuotaPeriodSec= do."""
        period_us = period_ms * 1000
        if (self.path / "cpu.cfs_quota_us").exists():
            (self.path / "cpu.cfs_period_us").write_text(str(period_us))
            (self.path / "cpu.cfs_quota_us").write_text(str(int(cores * period_us)))
        else:
            (self.path / "cpu.max").write_text(f"{int(cores * period_us)} {period_us}")


class StorageGroup(ControlGroup):
    """A part of what a storage device delivers."""

    def limit(self, folder: Path, bytes_per_s: int) -> None:
        """Limits reading from the device of this folder, as IOReadBandwidthMax= does."""
        device = folder.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        if (old := self.path / "blkio.throttle.read_bps_device").exists():
            old.write_text(f"{number} {bytes_per_s}")
        else:
            (self.path / "io.max").write_text(f"{number} rbps={bytes_per_s}")


class MemoryGroup(ControlGroup):
    """The memory of some programs."""

    def swap_out(self, size: int) -> None:
        """Takes memory from the group until about `size` bytes of its programs' data are swapped out."""
        first = self.path / "memory.limit_in_bytes"
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        data = int(stat["rss"] if first.exists() else stat["anon"])
        limit = first if first.exists() else self.path / "memory.max"
        limit.write_text(str(data - size))
        limit.write_text("-1" if first.exists() else "max")


@contextlib.contextmanager
def swap_space(path: Path, size: int) -> Iterator[None]:
    """Swap space in a file of this path, for groups with too little memory. Raises OSError where that is not allowed.

    Programs outside of such groups use it only if the machine runs out of memory.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    try:
        path.chmod(0o600)
        _run("mkswap", path)
        _run("swapon", path)
        try:
            yield
        finally:
            _run("swapoff", path)
    finally:
        path.unlink()


def _run(command: str, path: Path) -> None:
    done = subprocess.run([command, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command} {path}: {done.stderr.strip()}")


@contextlib.contextmanager
def memory_group(name: str, root: Path = ROOT) -> Iterator[MemoryGroup]:
    """A new one at the top, removed once its processes have ended. Raises OSError where that is not allowed."""
    with _folder(name, "memory", root) as path:
        yield MemoryGroup(path)


@contextlib.contextmanager
def cpu_group(name: str, root: Path = ROOT) -> Iterator[CpuGroup]:
    """A new one at the top, removed once its processes have ended. Raises OSError where that is not allowed."""
    with _folder(name, "cpu", root) as path:
        yield CpuGroup(path)


@contextlib.contextmanager
def storage_group(name: str, root: Path = ROOT) -> Iterator[StorageGroup]:
    """A new one at the top, removed once its processes have ended. Raises OSError where that is not allowed."""
    with _folder(name, "io", root) as path:
        yield StorageGroup(path)


@contextlib.contextmanager
def _folder(name: str, controller: str, root: Path) -> Iterator[Path]:
    own = root / _FIRST_VERSION.get(controller, controller)
    if not own.is_dir():  # the unified hierarchy
        (root / "cgroup.subtree_control").write_text(f"+{controller}")
    path = (own if own.is_dir() else root) / name
    path.mkdir()
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
