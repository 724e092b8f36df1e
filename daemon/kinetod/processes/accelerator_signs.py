"""Which plug-ins' accelerators a Python process shows signs of, as far as these are seen from outside. Blocking.

Theory of operation
    An agent decides inside its process whether a plug-in is for it (kineto_agent.sources.plugins.signs). Lists and
    `kinetoctl doctor` want to know it of processes without an agent, and see less: the files that are mapped, the
    variables that the program was started with, and the files that it has open. Imported modules are not seen, nor
    what a variable is by now, so that only its name counts here. A device file exists for every process; only one that
    is open tells processes apart, and it is looked for only where a plug-in declares nothing that tells more.

    The map of a process with torch takes longer to read than all else that a list says of it. So what was found in it
    is remembered with the size of the address space, which a library that is loaded changes; one that leaves it as it
    was, because as much was freed meanwhile, is seen when the map is read again all the same, after REREAD_S.
"""

import os
import re
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from kineto_agent.protocol.plugin_bundle import Signs

from kinetod.processes.proc_folder import ProcessFolder

_MAPPED = re.compile(rb"/([^/\n]+)$", re.MULTILINE)
_DELETED = b" (deleted)"
REREAD_S = 30.0
_MAX_KNOWN = 4096  # processes


class OutsideSigns(NamedTuple):
    """What is seen from outside of a plug-in's signs. Each member that is not empty must have a match."""

    plugin: str
    libraries: tuple[str, ...] = ()  # patterns of the names of mapped files
    variables: tuple[str, ...] = ()  # names
    open_files: tuple[str, ...] = ()  # patterns of paths

    def __bool__(self) -> bool:
        """Whether anything of it is seen from outside."""
        return any(self[1:])


def outside(plugin: str, signs: Signs) -> OutsideSigns:
    """The part of a plug-in's signs that is seen from outside; false if there is none."""
    variables = tuple(dict.fromkeys(pattern.partition("=")[0] for pattern in signs.environment))
    tells = bool(signs.libraries or variables)
    return OutsideSigns(plugin, signs.libraries, variables, () if tells else signs.device_files)


class _Answers(NamedTuple):
    """What was found in the map of a program: whether any of these patterns matches a file."""

    size: bytes  # of the address space, as /proc has it
    at_s: float  # monotonic
    matches: dict[tuple[str, ...], bool]


_known: dict[tuple[int, str], _Answers] = {}  # by pid and program


def shown(folder: ProcessFolder, program: str, wanted: Iterable[OutsideSigns]) -> tuple[str, ...]:
    """The plug-ins whose signs the process shows, in the given order; none of what may not be read.

    program: as `credentials.program` names it; empty: unknown.
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
    """What a process shows. Each is read once, when a plug-in asks for it."""

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
        """What is known of this program's map; that of a program without a name is not kept."""
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
        """Whether the program was started with one of these variables, or there are none."""
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
