"""A program of one thread is not told of ours when it forks.

Theory of operation
    From CPython 3.12 on, os.fork() and os.forkpty() issue a DeprecationWarning where the process has more than one
    thread, whoever has made them. A program of one thread would find it on its stderr because of ours, and from 3.15 on
    one that makes errors of warnings would get an exception out of os.fork(). So a filter that ignores this message is
    put into the interpreter's list before each fork. It looks at the threads when it is asked: a program with threads
    of its own is warned as it would be without us.

    The warning comes after the handlers of forks (up to 3.12, before the last of them). So the filter takes itself out
    when it has ignored it. If it has not, it stays until the next fork or the end of the agent: who takes himself out
    has the next one of the list left out.

    The list is changed in place. warnings.filterwarnings would also show those warnings again that were shown once.

    What is called on the program's thread before a fork is in C alone. In Python code a signal's handler could run, and
    what it raises would be lost there.

    In a live attach the bootstrap has made such a filter, which is there before any module of the agent; the loader
    makes it ask because_of_ours.
"""

import _warnings
import os
import sys
from itertools import repeat
from typing import Any, Callable, List

from kineto_agent.system.threads import others

_WARNS = (3, 12)
_MOST = 16  # threads of ours at one time
_BEGIN, _WORDS = "This process (pid=", ") is multi-threaded, use of fork"


def because_of_ours(message: str) -> bool:
    """Whether it is a warning of a fork, and all threads of the process but one are ours."""
    return message.startswith(_BEGIN) and _WORDS in message and others(_MOST) in (0, 1)


class _Pattern:
    """What a filter has in place of a regular expression."""

    def match(self, message: str) -> bool:
        """Whether to ignore it. Then the filter has done its work: later ones are not asked."""
        ignored = because_of_ours(message)
        if ignored:
            _take_away()
        return ignored


_FILTER = ("ignore", _Pattern(), DeprecationWarning, None, 0)
_list = {"in": ""}  # the name of the list of filters where a filter is to stand in it


def keep_away() -> None:
    """Keep the warning from programs of one thread from now on."""
    if sys.version_info >= _WARNS:
        if not _handlers:
            _handlers.append(_take_away)
            os.register_at_fork(before=_with([_FILTER].__add__), after_in_child=_take_away)
        _list["in"] = "filters"


def let_through() -> None:
    """The end of that."""
    _take_away()
    _list["in"] = ""


def _with(change: Callable[[List[Any]], List[Any]]) -> Callable[[], None]:
    """A function in C that gives the interpreter's list of filters what `change` makes of those that are not ours."""
    without = map(list, map(filter, repeat(_FILTER.__ne__), _filters()))
    return map(list.__init__, _filters(), map(change, without)).__next__


def _filters() -> Any:
    """The list, each time anew: as the interpreter looks for it itself."""
    modules = map(sys.modules.get, repeat("warnings"), repeat(_warnings))
    return map(getattr, modules, map(_list.__getitem__, repeat("in")), repeat([]))


_take_away = _with(list)
_handlers: List[Any] = []
