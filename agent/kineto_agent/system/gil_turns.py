"""Fair turns with the GIL, where the interpreter does not ensure them.

Theory of operation
    A live attach brings a native thread along (daemon/kinetod/attach/methods/turns_stub.c). If the agent gets no
    processor time although it has work, that thread makes the program release the GIL for a moment. So it must know
    when the agent has no work but waits for something else. It looks at the agent's CPU clock, so nothing needs to be
    said before each call that releases the GIL.
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
    """What that thread is told. address: of a struct python_turns that is never freed; 0: there is no such thread."""

    def __init__(self, address: int = 0) -> None:
        self._words: Any = [_Word.from_address(address + 4 * index) for index in range(3)] if address else None
        self._address = address
        self._pid = os.getpid()
        self._bit = 0

    def rest(self, limit_ms: int) -> None:
        """Say that the agent now waits for something else, for at most `limit_ms`; -1: without limit."""
        if self._words is not None:
            self._bit ^= 1
            self._words[0].value = -1 if limit_ms < 0 else min(limit_ms, _MOST_MS) << 1 | self._bit

    def work(self) -> None:
        """Say that the agent works again."""
        if self._words is not None:
            self._words[0].value = 0
            wake_waiter(self._address)

    def end(self) -> None:
        """Make the thread ask nothing more of the interpreter, which is ending, once this returns."""
        if self._words is None or os.getpid() != self._pid:
            return
        _rest, over, queueing = self._words
        over.value = 1
        wake_waiter(self._address)
        deadline = time.monotonic() + _END_LIMIT_S
        while queueing.value and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
