"""Finds other profilers on this host: the processes that use one, and their interference. Blocking."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kinetod.attach.attach_types import Finding, Status
from kinetod.attach.inspect.process_inspection import PROC, mapped_paths, read_file
from kinetod.base.safe_text import clean
from kinetod.processes.identity import ProcessFolder
from kinetod.processes.process_info import open_gpus
from kinetod.processes.profiler_signs import (
    BY_PRODUCT,
    CUPTI_USER,
    DCGM,
    EXPORTER,
    Holds,
    Sign,
    of_libraries,
    of_program,
)

_ENGINE_SOCKET = "nv-hostengine"  # /tmp/nv-hostengine unless its option -d changes that
COMMAND = ("dcgmi",)
DEADLINE_S = 3.0
_ROW = re.compile(r"^\|\s*\d+\s*\|\s*Profiling\s*\|\s*(.*?)\s*\|$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingTool:
    """A tool in a process. library: the file that revealed it; empty: its program's name did, or unknown."""

    product: str
    pid: int  # 0: not visible, but it listens
    library: str = ""
    gpus: tuple[int, ...] = ()  # minors of /dev/nvidiaN that the process has open


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All tools found. hidden: processes of which only the names are visible."""

    profilers: tuple[ProfilingTool, ...] = ()
    hidden: tuple[int, ...] = ()

    def joined(self, searched: Collection[int], found: Iterable[ProfilingTool]) -> "Scan":
        """Adds tools that another service has found in hidden processes. searched: the processes that it inspected."""
        seen = set(searched) & set(self.hidden)
        profilers = [each for each in self.profilers if each.pid not in seen]
        profilers += [each for each in found if each.pid in seen and each.product in BY_PRODUCT]
        return Scan(profilers=_in_order(profilers), hidden=tuple(pid for pid in self.hidden if pid not in seen))


def scan(proc: Path = PROC, own: frozenset[int] = frozenset()) -> Scan:
    """Scans all processes. own: processes to leave out."""
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
    """The tools in one process. Raises OSError; PermissionError if it may not be inspected."""
    found = []
    for sign, library in _signs(proc / str(pid)):
        gpus = _gpus(pid, proc)
        if gpus or sign is not CUPTI_USER:
            found.append(ProfilingTool(product=sign.product, pid=pid, library=library, gpus=gpus))
    return found


def _in_order(profilers: Iterable[ProfilingTool]) -> tuple[ProfilingTool, ...]:
    """Ordered by pid. Omits an engine of which only the socket is visible if some engine's process is."""
    found = sorted(profilers, key=lambda each: (each.pid, each.product))
    engines = any(each.pid and each.product == DCGM for each in found)
    return tuple(each for each in found if each.pid or not engines)


def _signs(folder: Path) -> Iterator[tuple[Sign, str]]:
    """Yields signs of tools in a process. Raises OSError."""
    paths = mapped_paths(folder)
    program = of_program(_names(folder))
    libraries = of_libraries([path.rpartition("/")[2] for path in paths])
    if program is not None:
        yield program, next((library for sign, library in libraries if sign is program), "")
        return  # its other libraries are its own
    yield from libraries


def _gpus(pid: int, proc: Path) -> tuple[int, ...]:
    with contextlib.suppress(OSError), ProcessFolder(pid, proc) as folder:
        return open_gpus(folder)
    return ()


def _names(folder: Path) -> set[str]:
    """The kernel's name of the program and the name it was started by; its user can choose both."""
    names = set()
    with contextlib.suppress(OSError):
        names.add(read_file(folder / "comm").decode("utf-8", "replace").strip())
    with contextlib.suppress(OSError):
        first = read_file(folder / "cmdline", 4096).partition(b"\0")[0].decode("utf-8", "replace")
        names.add(first.rpartition("/")[2])
    return names


def _engine_listens(proc: Path) -> bool:
    """Whether DCGM's engine listens in our network namespace."""
    with contextlib.suppress(OSError):
        lines = read_file(proc / "net/unix", 4 << 20).decode("utf-8", "replace").splitlines()
        return any(line.rpartition("/")[2] == _ENGINE_SOCKET for line in lines)
    return False


class Profiling(StrEnum):
    """State of DCGM's module for fields such as DCGM_FI_PROF_SM_ACTIVE, which it loads on their first use."""

    LOADED = "loaded"
    NOT_LOADED = "not loaded"
    UNKNOWN = "unknown"


def profiling(command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S) -> tuple[Profiling, str]:
    """Whether the module is loaded, and the reason if unknown. Blocking."""
    try:
        done = subprocess.run(
            [*command, "modules", "--list"],
            capture_output=True,
            timeout=deadline_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return Profiling.UNKNOWN, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return Profiling.UNKNOWN, f"{command[0]} did not respond within {deadline_s:g} s"
    except OSError as exc:
        return Profiling.UNKNOWN, f"{command[0]} cannot be started: {exc.strerror}"
    said = done.stdout.decode("utf-8", "replace")
    if match := _ROW.search(said):
        state = match[1].lower()
        return (Profiling.LOADED if state == "loaded" else Profiling.NOT_LOADED), ""
    last = (said + done.stderr.decode("utf-8", "replace")).strip().rpartition("\n")[2]
    return Profiling.UNKNOWN, f"{command[0]} says: {clean(last, 200) or 'nothing'}"


# Other profilers as checks for people: what each interferes with, and what to do. Pure.
NAME = "profilers"
_MAX_NAMED = 5
_NEEDS = "traces need no hardware counters"
_PAUSE = "`dcgmi profile --pause` frees them for another tool, and `dcgmi profile --resume` returns them to DCGM"
_ONE = "only one such tool can record in a process: traces of the processes it profiles contain no GPU activities"
_LATER = "trace those processes after it has ended"
_TEXTS = {
    Holds.PROCESS: (_ONE, _LATER),
    Holds.COUNTERS: (f"it may hold the hardware counters of its GPUs; {_NEEDS}", ""),
    Holds.BOTH: (f"{_ONE}; it also holds the hardware counters, which traces do not need", _LATER),
    Holds.PERHAPS: ("its library is loaded; while it profiles, a trace of that process contains no GPU activities", ""),
}


def findings(
    found: Scan, visible: Callable[[ProfilingTool], bool], dcgm: tuple[Profiling, str] | None
) -> tuple[Finding, ...]:
    """One finding for each tool. visible: whether its pid may be shown; dcgm: DCGM's state, None if not queried."""
    products: dict[str, list[ProfilingTool]] = {}
    for each in found.profilers:
        products.setdefault(each.product, []).append(each)
    if not products:
        return (Finding(NAME, Status.OK, f"none found{_unseen(found)}"),)
    return tuple(_finding(product, users, visible, dcgm) for product, users in products.items())


def library_finding(products: Sequence[str]) -> Finding:
    """The finding for one process to be traced, from its loaded libraries."""
    found = {product: BY_PRODUCT[product].holds for product in products}
    hindering = [product for product, holds in found.items() if holds in (Holds.PROCESS, Holds.BOTH)]
    if hindering:
        detail = (
            f"{', '.join(hindering)} loaded: only one such tool can record in a process, so a trace contains no GPU "
            "activities"
        )
        return Finding(NAME, Status.NOTE, detail, "trace it after that tool has ended, or start it without that tool")
    loaded = [product for product in found if product != CUPTI_USER.product]
    return Finding(NAME, Status.OK, f"{', '.join(loaded)} loaded, which need not interfere" if loaded else "none in it")


def _finding(
    product: str,
    users: Sequence[ProfilingTool],
    visible: Callable[[ProfilingTool], bool],
    dcgm: tuple[Profiling, str] | None,
) -> Finding:
    where = f"{product} ({named(users, visible)})"
    if product in (DCGM, EXPORTER):
        return _dcgm(where, *(dcgm or (Profiling.UNKNOWN, "it was not queried")))
    text, advice = _TEXTS[BY_PRODUCT[product].holds]
    return Finding(NAME, Status.NOTE, f"{where}: {text}", advice)


def _dcgm(where: str, state: Profiling, why: str) -> Finding:
    if state is Profiling.NOT_LOADED:
        return Finding(NAME, Status.OK, f"{where} runs without its profiling module: it holds no hardware counters")
    holds = "has its profiling module loaded: on GPUs before Hopper it may hold the hardware counters"
    if state is Profiling.UNKNOWN:
        holds = f"may hold hardware counters ({why})"
    detail = f"{where} {holds}, and then Nsight Compute and CUPTI's own counters fail; {_NEEDS}"
    return Finding(NAME, Status.NOTE, detail, _PAUSE)


def named(users: Iterable[ProfilingTool], visible: Callable[[ProfilingTool], bool]) -> str:
    """Names the processes, as far as they may be shown."""
    everybody = list(users)
    told = [_told(each) for each in everybody if each.pid and visible(each)]
    parts = told[:_MAX_NAMED]
    if len(told) > _MAX_NAMED:
        parts.append(f"{len(told) - _MAX_NAMED} more")
    others = sum(1 for each in everybody if each.pid and not visible(each))
    if others:
        parts.append(f"{others} process{'' if others == 1 else 'es'} of other users")
    return ", ".join(parts) or "listening on this host"


def _told(profiler: ProfilingTool) -> str:
    gpus = f", with GPU {', '.join(map(str, profiler.gpus))} open" if profiler.gpus else ""
    return f"pid {profiler.pid}{gpus}"


def _unseen(found: Scan) -> str:
    if not found.hidden:
        return ""
    return f"; {len(found.hidden)} processes of other users could be checked only by name"
