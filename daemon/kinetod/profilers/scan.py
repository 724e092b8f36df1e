"""Looks for other profilers among the processes of this host. Blocking, also at hostile processes' pleasure."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kinetod.attach.facts import PROC, mapped_paths, read_file
from kinetod.process_folder import ProcessFolder
from kinetod.procs import open_gpus
from kinetod.profilers.signs import CUPTI_USER, DCGM, Sign, of_libraries, of_program

_ENGINE_SOCKET = "nv-hostengine"  # /tmp/nv-hostengine unless its -d says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiler:
    """A tool in a process. library: the file by which it was known; empty: by the program's name."""

    product: str
    pid: int  # 0: not seen, but it listens
    library: str = ""
    gpus: tuple[int, ...] = ()  # minors of /dev/nvidiaN that the process has open


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All of them. hidden: processes whose files and mappings may not be seen, only their names."""

    profilers: tuple[Profiler, ...] = ()
    hidden: int = 0


def scan(proc: Path = PROC, own: frozenset[int] = frozenset()) -> Scan:
    """own: processes to leave out."""
    found: list[Profiler] = []
    hidden = 0
    for entry in proc.iterdir():
        if not entry.name.isdecimal() or int(entry.name) in own:
            continue
        try:
            signs = list(_of_process(entry))
        except PermissionError:
            hidden += 1
            signs = [(sign, "") for sign in filter(None, [of_program(_names(entry))])]
        except OSError:
            continue  # it has ended
        for sign, library in signs:
            gpus = _gpus(int(entry.name), proc)
            if gpus or sign is not CUPTI_USER:
                found.append(Profiler(product=sign.product, pid=int(entry.name), library=library, gpus=gpus))
    if not any(each.product == DCGM for each in found) and _engine_listens(proc):
        found.append(Profiler(product=DCGM, pid=0))
    return Scan(profilers=tuple(sorted(found, key=lambda each: (each.pid, each.product))), hidden=hidden)


def _of_process(folder: Path) -> Iterator[tuple[Sign, str]]:
    """Raises OSError; PermissionError if it may not be looked into."""
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
    """What the kernel calls the program, and what it was started as. Whoever runs a program can choose both."""
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
