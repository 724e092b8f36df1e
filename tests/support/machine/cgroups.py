"""Control groups for tests: real ones of this machine, and written folders of any version for what it does not have."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
MIB = 1 << 20


class RealGroup:
    """A group of one controller."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version

    def add(self, pid: int) -> None:
        """Moves a process into the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def write(self, name: str, value: object) -> None:
        """Writes to one of the group's files."""
        (self.folder / name).write_text(str(value))

    def number(self, name: str) -> int:
        """Reads a number from one of the group's files."""
        return int((self.folder / name).read_text())


@contextlib.contextmanager
def real_group(controller: str, name: str, *, version: int = 1) -> Iterator[RealGroup]:
    """At the top of a hierarchy of this machine; skips the test where there is none or that is not allowed."""
    top = ROOT / controller if version == 1 else next((p for p in (ROOT / "unified", ROOT) if _unified(p)), ROOT)
    folder = top / name
    if not (top / "cgroup.procs").exists() or (version == 2 and not _unified(top)):
        pytest.skip(f"no cgroup version {version} for {controller} here")
    try:
        if version == 2 and controller != "freezer" and controller not in (top / "cgroup.controllers").read_text():
            pytest.skip(f"{controller} is not in version 2 here")
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"control groups cannot be made here: {exc}")
    try:
        yield RealGroup(folder, version)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (top / "cgroup.procs").write_text(pid)
        folder.rmdir()


def _unified(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


@contextlib.contextmanager
def frozen(group: RealGroup) -> Iterator[str]:
    """Freezes the group's processes; the file that does it."""
    name, freeze, thaw = ("cgroup.freeze", "1", "0") if group.version == 2 else ("freezer.state", "FROZEN", "THAWED")
    group.write(name, freeze)
    try:
        yield str(group.folder / name)
    finally:
        group.write(name, thaw)


class Written:
    """A /proc and a hierarchy that somebody wrote, with a process 7 in /jobs/one."""

    def __init__(self, folder: Path, *, version: int, controller: str = "memory", root: str = "/") -> None:
        self.proc, self.top = folder / "proc", folder / "cgroup fs"
        own = f"4:cpu,{controller}:/jobs/one\n" if version == 1 else ""
        kind = f"cgroup cgroup rw,{controller},cpu" if version == 1 else "cgroup2 cgroup rw,nsdelegate"
        mounted = str(self.top).replace(" ", "\\040")
        self.write(self.proc / "self/mountinfo", f"30 24 0:26 {root} {mounted} rw,nosuid shared:9 - {kind}\n")
        self.write(self.proc / "7/cgroup", f"{own}0::/jobs/one\n")
        self.write(self.proc / "7/status", "Name:\tjob\nState:\tS (sleeping)\n")
        (self.top / "jobs/one").mkdir(parents=True)

    @staticmethod
    def write(path: Path, text: str) -> None:
        """A file and the folders above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, files: Mapping[str, object]) -> None:
        """Writes the files of one group."""
        for name, value in files.items():
            self.write(self.top / path / name, f"{value}\n")
