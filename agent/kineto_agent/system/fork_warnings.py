"""Keeps single-threaded programs from being warned about our threads when they fork.

Theory of operation
    From CPython 3.12 on, os.fork() and os.forkpty() issue a DeprecationWarning if the process has more than one thread,
    whoever created them. Because of ours, a single-threaded program would get it on its stderr, and from 3.15 on a
    program that turns warnings into errors would get an exception from os.fork(). So a filter that ignores this message
    is added to the interpreter's list before each fork. It checks the threads when it is evaluated: a program with
    threads of its own is warned as it would be without us.

    The warning comes after the handlers of forks (up to 3.12, before the last of them). So the filter removes itself
    when it has ignored the warning. Otherwise it stays until the next fork or the end of the agent: when a filter
    removes itself, the interpreter skips the next one in the list.

    The list is changed in place. warnings.filterwarnings would also cause warnings that are shown once to be shown
    again.

    The code that runs on the program's thread before a fork is all in C. In Python code a signal handler could run, and
    its exceptions would be lost.

    A live attach has added filters for the exact text of the warning to the list before it created any thread (hush()
    of opening_stub.c); the loader removes them once this module is active.
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
    """Whether it is a fork warning, and all threads of the process but one are ours."""
    return message.startswith(_BEGIN) and _WORDS in message and others(_MOST) in (0, 1)


class _Pattern:
    """Replaces the regular expression of a filter."""

    def match(self, message: str) -> bool:
        """Whether to ignore the warning. The filter has then done its work: later filters are not evaluated."""
        ignored = because_of_ours(message)
        if ignored:
            _take_away()
        return ignored


_FILTER = ("ignore", _Pattern(), DeprecationWarning, None, 0)
_list = {"in": ""}  # name of the list of filters while it should contain a filter


def keep_away() -> None:
    """Suppress the warning for single-threaded programs from now on."""
    if sys.version_info >= _WARNS:
        if not _handlers:
            _handlers.append(_take_away)
            os.register_at_fork(before=_with([_FILTER].__add__), after_in_child=_take_away)
        _list["in"] = "filters"


def let_through() -> None:
    """Stop suppressing the warning."""
    _take_away()
    _list["in"] = ""


def _with(change: Callable[[List[Any]], List[Any]]) -> Callable[[], None]:
    """Builds a callable, all in C, that replaces warnings.filters by `change` of the filters that are not ours."""
    without = map(list, map(filter, repeat(_FILTER.__ne__), _filters()))
    return map(list.__init__, _filters(), map(change, without)).__next__


def _filters() -> Any:
    """The list of filters, looked up anew each time, as the interpreter does."""
    modules = map(sys.modules.get, repeat("warnings"), repeat(_warnings))
    return map(getattr, modules, map(_list.__getitem__, repeat("in")), repeat([]))


_take_away = _with(list)
_handlers: List[Any] = []
