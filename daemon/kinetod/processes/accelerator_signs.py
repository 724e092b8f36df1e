"""Finds plug-ins whose accelerator a Python process seems to use, by signs visible from outside. Blocking.

Theory of operation
    An agent decides inside its process whether a plug-in applies (kineto_agent.sources.plugins.guarded_source). Lists
    and `kinetoctl doctor` need this for processes without an agent, and see less: mapped files, the variables that the
    program was started with, and open files. Imported modules and current values of variables are not visible, so only
    a variable's name counts here. A device file exists for every process; only an open one distinguishes processes, and
    it is checked only if a plug-in declares nothing more specific.

    The map of a process with torch takes longer to read than everything else in a list. So the result is cached with
    the size of the address space, which changes when a library is loaded; if the size stays equal because as much
    memory was freed, the library is seen when the map is read again anyway, after REREAD_S.
"""

import os
import re
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from kineto_agent.protocol.plugin_bundle import Signs

from kinetod.processes.identity import ProcessFolder

_MAPPED = re.compile(rb"/([^/\n]+)$", re.MULTILINE)
_DELETED = b" (deleted)"
REREAD_S = 30.0
_MAX_KNOWN = 4096  # processes


class OutsideSigns(NamedTuple):
    """The part of a plug-in's signs that is visible from outside. Each non-empty field must have a match."""

    plugin: str
    libraries: tuple[str, ...] = ()  # patterns of the names of mapped files
    variables: tuple[str, ...] = ()  # names
    open_files: tuple[str, ...] = ()  # patterns of paths

    def __bool__(self) -> bool:
        """Whether any sign is visible from outside."""
        return any(self[1:])


def outside(plugin: str, signs: Signs) -> OutsideSigns:
    """The part of a plug-in's signs that is visible from outside; false if there is none."""
    variables = tuple(dict.fromkeys(pattern.partition("=")[0] for pattern in signs.environment))
    tells = bool(signs.libraries or variables)
    return OutsideSigns(plugin, signs.libraries, variables, () if tells else signs.device_files)


class _Answers(NamedTuple):
    """Cached result for a program's map: whether any of these patterns matches a file."""

    size: bytes  # of the address space, as in /proc
    at_s: float  # monotonic
    matches: dict[tuple[str, ...], bool]


_known: dict[tuple[int, str], _Answers] = {}  # by pid and program


def shown(folder: ProcessFolder, program: str, wanted: Iterable[OutsideSigns]) -> tuple[str, ...]:
    """The plug-ins whose signs the process shows, in the given order; unreadable signs do not count.

    program: as named by `credentials.program`; empty: unknown.
    """
    process = _Process(folder, program)
    return tuple(
        signs.plugin
        for signs in wanted
        if signs
        and process.has_any(signs.variables)
        and process.maps_any(signs.libraries)
        and process.has_open(signs.open_files)
    )


class _Process:
    """The signs of one process. Each is read once, when a plug-in needs it."""

    def __init__(self, folder: ProcessFolder, program: str) -> None:
        self._folder = folder
        self._program = program

    def maps_any(self, patterns: tuple[str, ...]) -> bool:
        """Whether a file is mapped whose name one of the patterns matches, or there are no patterns."""
        if not patterns:
            return True
        if patterns not in self._matches:
            try:
                names = self._mapped
            except OSError:
                return False
            self._matches[patterns] = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
        return self._matches[patterns]

    @cached_property
    def _mapped(self) -> frozenset[str]:
        text = self._folder.read_once("maps").replace(_DELETED + b"\n", b"\n")
        return frozenset(map(os.fsdecode, _MAPPED.findall(text)))

    @cached_property
    def _matches(self) -> dict[tuple[str, ...], bool]:
        """The cached matches of this program's map; not kept for a program without a name."""
        if not self._program:
            return {}
        try:
            size = self._folder.read("statm").partition(b" ")[0]
        except OSError:
            return {}
        key, now_s = (self._folder.pid, self._program), time.monotonic()
        known = _known.get(key)
        if known is None or known.size != size or now_s - known.at_s >= REREAD_S:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            known = _known[key] = _Answers(size, now_s, {})
        return known.matches

    def has_any(self, variables: tuple[str, ...]) -> bool:
        """Whether the program was started with one of these variables, or the tuple is empty."""
        try:
            return not variables or any(b"\0%b=" % os.fsencode(name) in self._environ for name in variables)
        except OSError:
            return False

    def has_open(self, patterns: tuple[str, ...]) -> bool:
        """Whether a file is open whose path one of the patterns matches, or there are no patterns."""
        try:
            return not patterns or any(fnmatchcase(path, each) for path in self._opened for each in patterns)
        except OSError:
            return False

    @cached_property
    def _environ(self) -> bytes:
        return b"\0" + self._folder.read_once("environ")

    @cached_property
    def _opened(self) -> frozenset[str]:
        return frozenset(self._folder.links("fd"))
