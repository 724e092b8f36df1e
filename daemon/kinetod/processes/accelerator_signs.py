"""Which plug-ins' accelerators a Python process shows signs of, as far as these are seen from outside. Blocking.

Theory of operation
    An agent decides inside its process whether a plug-in is for it (kineto_agent.sources.plugins.signs). Lists and
    `kinetoctl doctor` want to know it of processes without an agent, and see less: the files that are mapped, the
    variables that the program was started with, and the files that it has open. Imported modules are not seen, nor
    what a variable is by now, so that only its name counts here. A device file exists for every process; only one that
    is open tells processes apart, and it is looked for only where a plug-in declares nothing that tells more.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from kineto_agent.protocol.plugin_bundle import Signs

from kinetod.processes.proc_folder import ProcessFolder

_MAPPED = re.compile(rb"/([^/\n]+)$", re.MULTILINE)
_DELETED = b" (deleted)"


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


def shown(folder: ProcessFolder, wanted: Iterable[OutsideSigns]) -> tuple[str, ...]:
    """The plug-ins whose signs the process shows, in the given order; none of what may not be read."""
    process = _Process(folder)
    return tuple(
        signs.plugin
        for signs in wanted
        if signs
        and _any(signs.variables, lambda: process.variables, lambda found, name: found == name)
        and _any(signs.libraries, lambda: process.mapped, fnmatchcase)
        and _any(signs.open_files, lambda: process.opened, fnmatchcase)
    )


def _any(patterns: Sequence[str], found: Callable[[], Iterable[str]], matches: Callable[[str, str], bool]) -> bool:
    return not patterns or any(matches(each, pattern) for each in found() for pattern in patterns)


class _Process:
    """What a process shows. Each is read once, when a plug-in asks for it."""

    def __init__(self, folder: ProcessFolder) -> None:
        self._folder = folder

    @cached_property
    def mapped(self) -> frozenset[str]:
        with contextlib.suppress(OSError):
            text = self._folder.read("maps").replace(_DELETED + b"\n", b"\n")
            return frozenset(map(os.fsdecode, _MAPPED.findall(text)))
        return frozenset()

    @cached_property
    def variables(self) -> frozenset[str]:
        with contextlib.suppress(OSError):
            entries = self._folder.read("environ").split(b"\0")
            return frozenset(os.fsdecode(entry.partition(b"=")[0]) for entry in entries)
        return frozenset()

    @cached_property
    def opened(self) -> frozenset[str]:
        with contextlib.suppress(OSError):
            return frozenset(self._folder.links("fd"))
        return frozenset()
