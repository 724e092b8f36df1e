"""Turns with the GIL, where the interpreter does not see to them.

Theory of operation
    A live attach brings a native thread along (daemon/kinetod/attach/methods/turns_stub.c). Where the agent gets no
    processor
    time although it works, that thread has the program give the GIL away for a moment. So it is told when the agent
    does not work but waits for something else. It looks at the agent's clock, thus nothing needs to be said before
    each single call that gives the GIL away.
"""

import _ctypes
import os
import time
from typing import Any

from kineto_agent.system.descriptors import wake_waiter

_END_LIMIT_S = 1.0
_PAUSE_S = 0.0002
_MOST_MS = (1 << 30) - 1


class _Word(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class Turns:
    """What that thread is told. address: of a struct python_turns, which stays; 0: there is no such thread."""

    def __init__(self, address: int = 0) -> None:
        self._words: Any = [_Word.from_address(address + 4 * index) for index in range(3)] if address else None
        self._address = address
        self._pid = os.getpid()
        self._bit = 0

    def rest(self, limit_ms: int) -> None:
        """The agent waits for something else now, at most so long; -1: for ever."""
        if self._words is not None:
            self._bit ^= 1
            self._words[0].value = -1 if limit_ms < 0 else min(limit_ms, _MOST_MS) << 1 | self._bit

    def work(self) -> None:
        """It works again."""
        if self._words is not None:
            self._words[0].value = 0
            wake_waiter(self._address)

    def end(self) -> None:
        """Nothing is asked of the interpreter any more once this returns, since it is ending."""
        if self._words is None or os.getpid() != self._pid:
            return
        _rest, over, queueing = self._words
        over.value = 1
        wake_waiter(self._address)
        deadline = time.monotonic() + _END_LIMIT_S
        while queueing.value and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
