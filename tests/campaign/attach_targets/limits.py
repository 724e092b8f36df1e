"""Targets at a limit of theirs, or that do not run at all for a while: stopped, frozen, waiting in the kernel."""

import ctypes
import os
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from campaign.attach_targets.control import Target, must_be
from campaign.attach_targets.loops import python_work

MIB = 1 << 20
STANDS_S, RUNS_S = 0.02, 0.05
CGROUPS = Path("/sys/fs/cgroup")


# In C: a child that went on in Python would need Python's fork handlers (docs/harm.md).
_STAND = """
#include <unistd.h>
int stand(unsigned us) {
    const int child = vfork();
    if (child == 0) {
        usleep(us);
        _exit(3);
    }
    return child;
}
"""


class InKernel(Target):
    """Nearly always in state D, like a program that waits for its disk: in vfork() until its child has ended."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "libstands.so"
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
            subprocess.run(command, input=_STAND.encode(), check=True)
            self._stand = ctypes.PyDLL(str(library)).stand  # with the GIL

    def lap(self) -> None:
        child = self._stand(int(STANDS_S * 1e6))
        must_be("the child's end", os.waitpid(child, 0), (child, 3 << 8))


class Work(Target):
    """Works, while a child does something to it again and again until the pipe between them is closed."""

    def __init__(self, stand: Callable[[], Any] = lambda: None, go_on: Callable[[], Any] = lambda: None) -> None:
        self._wanted = python_work()
        self._orders = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self._orders[1])
            os.set_blocking(self._orders[0], False)
            while self._goes_on():
                time.sleep(RUNS_S)
                stand()
                time.sleep(STANDS_S)
                go_on()
            os._exit(0)

    def _goes_on(self) -> bool:
        try:
            return os.read(self._orders[0], 1) != b""
        except BlockingIOError:
            return True

    def lap(self) -> None:
        must_be("the sum", python_work(), self._wanted)

    def close(self) -> None:
        os.close(self._orders[1])
        must_be("the child's end", os.waitpid(self.child, 0)[1], 0)


def stopping() -> Target:
    """Stops the process by SIGSTOP at times."""
    own = os.getpid()
    return Work(lambda: os.kill(own, signal.SIGSTOP), lambda: os.kill(own, signal.SIGCONT))


def _group(controller: str) -> Path:
    """A new control group with this process in it."""
    folder = CGROUPS / controller / ("kineto-target-%d" % os.getpid())
    folder.mkdir()
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    return folder


class Grouped(Target):
    """A target in a control group, which it leaves at its end."""

    def __init__(self, controller: str, make: Callable[[Path], Target]) -> None:
        self._folder = _group(controller)
        self._target = make(self._folder)

    def lap(self) -> None:
        self._target.lap()

    def close(self) -> None:
        self._target.close()
        (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()


def _freezing(name: str, freeze: str, thaw: str) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        file = folder / name
        target = Work(lambda: file.write_text(freeze), lambda: file.write_text(thaw))
        (folder.parent / "cgroup.procs").write_text(str(target.child))
        return target

    return make


class Memory(Target):
    """Has as much memory left in its control group, and allocates and frees a quarter of it all the time."""

    def __init__(self, folder: Path, left: int) -> None:
        self._left = left
        usage = int((folder / "memory.usage_in_bytes").read_text())
        (folder / "memory.limit_in_bytes").write_text(str(usage + left))

    def lap(self) -> None:
        block = bytearray(self._left // 4)
        block[::4096] = b"x" * len(block[::4096])
        must_be("the block", block.count(b"x"), len(block) // 4096)


def _limited(kind: int, left: Callable[[], int]) -> Target:
    target = Work()
    limit = left()
    resource.setrlimit(kind, (limit, limit))
    return target


def _addresses() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize() + 32 * MIB


def few_threads(folder: Path) -> Target:
    """Limits the process to two threads, which it has already."""
    target = Work()
    (folder / "pids.max").write_text("2")
    return target


KINDS: Dict[str, Callable[[], Target]] = {
    "in_kernel": InKernel,
    "stopping": stopping,
    "freezing_v1": lambda: Grouped("freezer", _freezing("freezer.state", "FROZEN", "THAWED")),
    "freezing_v2": lambda: Grouped("unified", _freezing("cgroup.freeze", "1", "0")),
    "near_oom": lambda: Grouped("memory", lambda folder: Memory(folder, 28 * MIB)),
    "few_addresses": lambda: _limited(resource.RLIMIT_AS, _addresses),
    "few_descriptors": lambda: _limited(resource.RLIMIT_NOFILE, lambda: 12),
    "few_threads": lambda: Grouped("pids", few_threads),
}
NEEDS: List[str] = ["freezing_v1", "freezing_v2", "near_oom", "few_threads"]  # control groups of this layout
