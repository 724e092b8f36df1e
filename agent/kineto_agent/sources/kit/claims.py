"""Decides which agent of a process records through a vendor's library.

Such a library has one set of callbacks for the whole process, but a process may have two agents, each with its own
collector: the program's kineto_agent, and one from a live attach. The recording agent sets an attribute of sys, the one
place that both see.
"""

import os
import sys

from kineto_agent.sources.interface import SourceError


class Claim:
    """The right of one collector to use a vendor's library."""

    def __init__(self, name: str, title: str, library: str, reason_code: str) -> None:
        """name: of the vendor, the same in all agents. title: for people. library: path of the collector."""
        self._marker = "_kineto_" + name
        self._title = title
        self._library = library
        self._reason_code = reason_code
        self._claim = (os.getpid(), library)

    def take(self) -> None:
        """Claim the library, before its arena is created. Raises SourceError if another agent has it."""
        self._claim = (os.getpid(), self._library)
        holder = sys.__dict__.setdefault(self._marker, self._claim)
        if holder is self._claim:
            return
        if holder[0] == os.getpid():
            raise SourceError(
                self._reason_code,
                "another kineto agent in this process is recording with %s (its collector is %s): try again once "
                "that capture has ended" % (self._title, holder[1]),
            )
        sys.__dict__[self._marker] = self._claim  # it belonged to the parent at the fork

    def release(self) -> None:
        """Release the library, if it is claimed."""
        if sys.__dict__.get(self._marker) is self._claim:
            del sys.__dict__[self._marker]
