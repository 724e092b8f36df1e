"""Fair turns with the GIL, where the interpreter does not ensure them.

Theory of operation
    If the agent gets no CPU time although it has work, a native thread makes the program release the GIL for a moment
    (agent/native/turns/gil_turns.c). A live attach includes such a thread; an agent that starts by itself starts one
    from the collector library. It does so before its own thread, which needs the GIL for its first step and counts as
    waiting for it until it has identified itself. There is no such thread in a free-threaded build, in a
    sub-interpreter, without the library, or if the system refuses to create it.

    The thread must know when the agent has no work but waits for something else. It reads the agent's CPU clock, so
    calls that release the GIL need not be announced. When a rest ends, the agent needs the GIL before Python code can
    report that. So the agent's own library does the polling, and reports the end itself.
"""

import _ctypes
import _thread
import os
import select
import struct
import sys
import time
from typing import Any, List, Optional, Sequence, Tuple

from kineto_agent.system.c_functions import Function, FunctionWithoutGil, open_library, symbol_address
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.descriptors import wake_waiter

ABI = 2  # KC_TURNS_ABI
_ENDS = -4  # KC_ORDER: the thread of the previous agent has not ended yet
_U32 = 0xFFFFFFFF
_BEGIN_LIMIT_S = 0.02  # for the thread of a previous agent; then there is none
_END_LIMIT_S = 0.02  # in a call of the interpreter that must finish first; usually microseconds
_PAUSE_S = 0.0002
_MOST_MS = (1 << 30) - 1
_OTHER = 2  # a bit of `rest`
_DESCRIPTOR = struct.Struct("=ihh")  # struct pollfd
_THREAD_OFFSET = 20  # in a struct python_turns


class _Word(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class Turns:
    """Parameters of the native thread, and the entry point of the agent's own thread.

    address: of a struct python_turns that is never freed; 0: there is no thread yet. library: path of the library that
    starts it; "": none.
    """

    def __init__(self, address: int = 0, library: str = "") -> None:
        self._words: Any = None  # rest, over and queueing
        self._address = 0
        self._library = library
        self._poll: Any = None
        self._pid = os.getpid()
        self._bit = 0
        if address:
            self._tell(address)

    def _tell(self, address: int) -> None:
        self._address = address
        self._words = [_Word.from_address(address + 4 * index) for index in range(3)]

    def begin(self) -> None:
        """Start the thread, if there is none yet, for an agent thread that is started next: see `runs`."""
        if self._words is not None or not self._library or "t" in getattr(sys, "abiflags", ""):
            return
        try:
            address = self._begun(open_library(self._library))
        except Exception:  # noqa: BLE001 - an audit hook may raise anything; the agent does without
            log_exception("turns with the GIL")
            return
        if address > 0:
            self._tell(address)
        else:
            log("cannot start the thread for turns with the GIL: %d", address)

    def _begun(self, library: int) -> int:
        abi, begin, poll = (symbol_address(library, "kc_turns_" + name) for name in ("abi", "begin", "poll"))
        if Function(abi)() & _U32 != ABI:
            return 0
        deadline = time.monotonic() + _BEGIN_LIMIT_S
        address: int = Function(begin)()
        while address == _ENDS and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            address = Function(begin)()
        self._poll = FunctionWithoutGil(poll) if address > 0 else None
        return address

    def runs(self) -> None:
        """Note that the calling thread is the agent's."""
        if self._words is not None:
            _Word.from_address(self._address + _THREAD_OFFSET).value = _thread.get_native_id()

    def poll(self, wanted: Sequence[Tuple[int, int]], timeout_ms: Optional[int]) -> List[Tuple[int, int]]:
        """Rest until a descriptor is ready. wanted: descriptors and masks. Returns the ready ones."""
        limit_ms = -1 if timeout_ms is None else timeout_ms
        self.rest(limit_ms)
        if self._poll is not None:
            found = b"".join(_DESCRIPTOR.pack(descriptor, mask, 0) for descriptor, mask in wanted)
            self._poll(found, len(wanted), limit_ms)
            return [(descriptor, ready) for descriptor, _mask, ready in _DESCRIPTOR.iter_unpack(found) if ready]
        poller = select.poll()
        for descriptor, mask in wanted:
            poller.register(descriptor, mask)
        try:
            return poller.poll(limit_ms)
        finally:
            self.work()

    def rest(self, limit_ms: int) -> None:
        """Note that the agent waits for something else from now on, for at most `limit_ms`; -1: without limit."""
        if self._words is not None:
            self._bit ^= 1
            self._words[0].value = -1 if limit_ms < 0 else min(limit_ms, _MOST_MS) << 1 | self._bit

    def work(self) -> None:
        """Note that the agent works again."""
        if self._words is not None:
            self._words[0].value = 0
            wake_waiter(self._address)

    def end(self) -> None:
        """End the thread; once this returns, it makes no more calls of the interpreter."""
        if self._words is None or os.getpid() != self._pid:
            return
        rest, over, queueing = self._words
        over.value = 1
        rest.value ^= _OTHER  # it may be about to sleep until this changes
        wake_waiter(self._address)
        deadline = time.monotonic() + _END_LIMIT_S
        while queueing.value and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
