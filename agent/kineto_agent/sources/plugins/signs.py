"""Checks whether a process shows the signs of an accelerator: mapped files, variables and imports. Loads nothing."""

import os
import re
import sys
from fnmatch import fnmatchcase
from typing import Callable, FrozenSet, Optional, Tuple

from kineto_agent.protocol.plugin_bundle import Signs
from kineto_agent.system import mappings
from kineto_agent.system.descriptors import list_folder

_FILE = re.compile(rb"/([^/\n]+)$", re.MULTILINE)
_WILD = frozenset("*?[")


class ProcessView:
    """What a process shows at one moment. The mapped files are read once, when a plug-in needs them."""

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._maps = maps
        self._libraries: Optional[FrozenSet[str]] = None

    def libraries(self) -> FrozenSet[str]:
        """Names of the mapped files, without folders; none if they cannot be read."""
        if self._libraries is None:
            try:
                text = mappings.read(self._maps).replace(b" (deleted)\n", b"\n")
            except OSError:
                text = b""
            self._libraries = frozenset(os.fsdecode(name) for name in _FILE.findall(text))
        return self._libraries

    def matches(self, signs: Signs) -> bool:
        """Whether each declared kind of sign has a match. Cheap ones are checked first."""
        return (
            _any(signs.modules, lambda name: name in sys.modules)
            and _any(signs.environment, is_set)
            and _any(signs.device_files, _exists)
            and _any(signs.libraries, self._is_mapped)
        )

    def _is_mapped(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.libraries())


def _any(patterns: Tuple[str, ...], matches: Callable[[str], bool]) -> bool:
    return not patterns or any(map(matches, patterns))


def is_set(pattern: str) -> bool:
    """Whether a variable is set or matches a pattern: "NAME" or "NAME=pattern"."""
    name, equals, value = pattern.partition("=")
    found = os.environ.get(name)
    return found is not None and (not equals or fnmatchcase(found, value))


def _exists(pattern: str) -> bool:
    folder, _, name = pattern.rpartition("/")
    if not _WILD & set(name):
        return os.path.exists(pattern)
    try:
        return any(fnmatchcase(entry, name) for entry in list_folder(folder or "/"))
    except OSError:
        return False
