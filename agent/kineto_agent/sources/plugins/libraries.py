"""Loads the shared libraries of a plug-in, each from a memfd, once.

dlopen identifies a library by the path it was loaded from, although the descriptor may name another memfd by now. So
each library gets a path not used yet: the same one with a different count of "./".

A program may close all descriptors at any time and open a file of its own under the same number. So the number is
checked before each use.
"""

import ctypes
import errno
import os
from typing import Dict, Mapping

from kineto_agent.system.c_functions import open_library
from kineto_agent.system.descriptors import Identity, close_ours, identity, memfd
from kineto_agent.system.libraries import Library

_MFD_CLOEXEC = 0x1
_RTLD_NOLOAD = 0x4
_MOST_TRIES = 1000
_PIECE_BYTES = 64 << 10  # written between two checks


class PluginLibraries:
    """The libraries of one plug-in, by file name."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents
        self._loaded: Dict[str, ctypes.CDLL] = {}

    def load(self, name: str) -> ctypes.CDLL:
        """Returns the library. Raises OSError, also if the plug-in has no such file."""
        if name not in self._loaded:
            if name not in self._contents:
                raise OSError("the plug-in has no file %s" % name)
            self._loaded[name] = _opened(name, self._contents[name])
        return self._loaded[name]


def _opened(name: str, content: bytes) -> ctypes.CDLL:
    descriptor = memfd("kineto-" + name, _MFD_CLOEXEC)
    ours = identity(descriptor)
    try:
        written = 0
        while written < len(content):
            _check(descriptor, ours)
            written += os.pwrite(descriptor, content[written : written + _PIECE_BYTES], written)
        path = _unused_path(descriptor)
        _check(descriptor, ours)
        return Library(path)
    finally:
        close_ours(descriptor, ours)


def _check(descriptor: int, ours: Identity) -> None:
    if identity(descriptor) != ours:
        raise OSError(errno.EBADF, "the program has closed the descriptor of a plug-in's library")


def _unused_path(descriptor: int) -> str:
    for count in range(_MOST_TRIES):
        path = "/proc/self/fd/%s%d" % ("./" * count, descriptor)
        try:
            open_library(path, _RTLD_NOLOAD)
        except OSError:
            return path
    raise OSError("no unused path is left for loading descriptor %d" % descriptor)
