"""Locates the collector library: beside this package, or in a memfd from a live attach.

dlopen identifies a library by the path it was loaded from, although the descriptor may name another memfd by now. So
each library gets its own path: the same one with a different count of "./".
"""

import contextlib
from typing import NamedTuple, Optional

from kineto_agent.system.c_functions import half_open
from kineto_agent.system.descriptors import Identity, close_all, close_ours, identity

INSTALLED = __file__.rsplit("/", 2)[0] + "/_native/libkineto_collector.so"


class _Brought(NamedTuple):
    path: str
    descriptor: int
    identity: Identity


_brought: Optional[_Brought] = None
_loaded = ""


def path() -> str:
    """The path to open."""
    return _loaded or (INSTALLED if _brought is None else _brought.path)


def loaded() -> None:
    """Note that the library at path() has been loaded: from now on that path stands for it, even without the memfd."""
    global _loaded
    _loaded = path()
    close()


def bring(descriptor: int, number: int) -> None:
    """Use this memfd, which becomes ours, as the library. number: not used yet for any library of this process."""
    global _brought
    close()
    _brought = _Brought("/proc/self/fd/%s%d" % ("./" * number, descriptor), descriptor, identity(descriptor))


def forget() -> None:
    """Leave the memfd to whoever has brought it."""
    global _brought
    _brought = None


def close() -> None:
    """Close the memfd, if there is one. The library loaded from it stays."""
    global _brought
    brought = _brought
    if brought is not None:  # a child forked in between also closes it, while it is known
        close_ours(brought.descriptor, brought.identity)
    _brought = None


def close_in_child() -> None:
    """Close it in a forked child, with the loader's own descriptor if the fork happened during dlopen."""
    if _brought is not None and half_open(_brought.path):
        with contextlib.suppress(OSError):  # /proc may be missing
            close_all(_brought.identity)
    close()
