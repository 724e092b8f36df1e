"""Looks for other profilers among the processes of this host. Blocking, also at hostile processes' pleasure."""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kinetod.attach.inspect.process_inspection import PROC, mapped_paths, read_file
from kinetod.processes.proc_folder import ProcessFolder
from kinetod.processes.process_info import open_gpus
from kinetod.processes.profiler_signs import BY_PRODUCT, CUPTI_USER, DCGM, Sign, of_libraries, of_program

_ENGINE_SOCKET = "nv-hostengine"  # /tmp/nv-hostengine unless its -d says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingTool:
    """A tool in a process. library: the file by which it was known; empty: by the program's name, or not told."""

    product: str
    pid: int  # 0: not seen, but it listens
    library: str = ""
    gpus: tuple[int, ...] = ()  # minors of /dev/nvidiaN that the process has open


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All of them. hidden: processes whose files and mappings may not be seen, only their names."""

    profilers: tuple[ProfilingTool, ...] = ()
    hidden: tuple[int, ...] = ()

    def joined(self, searched: Collection[int], found: Iterable[ProfilingTool]) -> "Scan":
        """The same with what somebody else has found in hidden processes. searched: those that they looked into."""
        seen = set(searched) & set(self.hidden)
        profilers = [each for each in self.profilers if each.pid not in seen]
        profilers += [each for each in found if each.pid in seen and each.product in BY_PRODUCT]
        return Scan(profilers=_in_order(profilers), hidden=tuple(pid for pid in self.hidden if pid not in seen))


def scan(proc: Path = PROC, own: frozenset[int] = frozenset()) -> Scan:
    """own: processes to leave out."""
    found: list[ProfilingTool] = []
    hidden = []
    for pid in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()):
        if pid in own:
            continue
        try:
            found += look_into(pid, proc)
        except PermissionError:
            hidden.append(pid)
            if (sign := of_program(_names(proc / str(pid)))) is not None:
                found.append(ProfilingTool(product=sign.product, pid=pid))
        except OSError:
            continue  # it has ended
    if _engine_listens(proc):
        found.append(ProfilingTool(product=DCGM, pid=0))
    return Scan(profilers=_in_order(found), hidden=tuple(hidden))


def look_into(pid: int, proc: Path = PROC) -> list[ProfilingTool]:
    """The tools in one process. Raises OSError; PermissionError if it may not be looked into."""
    found = []
    for sign, library in _signs(proc / str(pid)):
        gpus = _gpus(pid, proc)
        if gpus or sign is not CUPTI_USER:
            found.append(ProfilingTool(product=sign.product, pid=pid, library=library, gpus=gpus))
    return found


def _in_order(profilers: Iterable[ProfilingTool]) -> tuple[ProfilingTool, ...]:
    """By pid. An engine of which only the socket is seen is left out if some engine's process is seen."""
    found = sorted(profilers, key=lambda each: (each.pid, each.product))
    engines = any(each.pid and each.product == DCGM for each in found)
    return tuple(each for each in found if each.pid or not engines)


def _signs(folder: Path) -> Iterator[tuple[Sign, str]]:
    """Raises OSError."""
    paths = mapped_paths(folder)
    program = of_program(_names(folder))
    libraries = of_libraries([path.rpartition("/")[2] for path in paths])
    if program is not None:
        yield program, next((library for sign, library in libraries if sign is program), "")
        return  # what else it maps is its own
    yield from libraries


def _gpus(pid: int, proc: Path) -> tuple[int, ...]:
    with contextlib.suppress(OSError), ProcessFolder(pid, proc) as folder:
        return open_gpus(folder)
    return ()


def _names(folder: Path) -> set[str]:
    """The kernel's name of the program and the name it was started by; whoever runs it can choose both."""
    names = set()
    with contextlib.suppress(OSError):
        names.add(read_file(folder / "comm").decode("utf-8", "replace").strip())
    with contextlib.suppress(OSError):
        first = read_file(folder / "cmdline", 4096).partition(b"\0")[0].decode("utf-8", "replace")
        names.add(first.rpartition("/")[2])
    return names


def _engine_listens(proc: Path) -> bool:
    """In our network namespace."""
    with contextlib.suppress(OSError):
        lines = read_file(proc / "net/unix", 4 << 20).decode("utf-8", "replace").splitlines()
        return any(line.rpartition("/")[2] == _ENGINE_SOCKET for line in lines)
    return False
