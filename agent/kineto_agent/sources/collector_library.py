"""Where the collector library lies: beside this package, or in a memfd that a live attach brought along.

dlopen takes a path that it has seen before for the library that it loaded then, although the descriptor may name
another memfd by now. So each library that is brought gets its own path: the same one with a different count of "./".
"""

from typing import NamedTuple, Optional

from kineto_agent.system.descriptors import Identity, close_ours, identity

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
    """Say that the library at path() has been loaded: from now on that path stands for it, even without the memfd."""
    global _loaded
    _loaded = path()
    close()


def bring(descriptor: int, number: int) -> None:
    """Use this memfd, which becomes ours, as the library. number: unused so far by any library of this process."""
    global _brought
    close()
    _brought = _Brought("/proc/self/fd/%s%d" % ("./" * number, descriptor), descriptor, identity(descriptor))


def close() -> None:
    """Close the memfd, if there is one. What was loaded from it stays."""
    global _brought
    brought, _brought = _brought, None
    if brought is not None:
        close_ours(brought.descriptor, brought.identity)
