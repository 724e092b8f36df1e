"""Fair turns with the GIL, where the interpreter does not ensure them.

Theory of operation
    If the agent gets no processor time although it has work, a native thread makes the program release the GIL for a
    moment (agent/native/turns/gil_turns.c). A live attach brings such a thread along; an agent that starts by itself
    begins one of its own, from the collector library. It does so before its own thread is started, which needs the
    GIL for its first step, and counts as one that waits for it until it says which thread it is. There is none in a
    free-threaded build, in a sub-interpreter, where the library is missing, and where the system gives no thread.

    The thread must know when the agent has no work but waits for something else. It looks at the agent's CPU clock, so
    nothing needs to be said before each call that releases the GIL. When a rest ends, the agent first has to get the
    GIL before Python can say so. So the agent's own library polls for it, and says so itself.

    The library is loaded with the GIL held: a child that the program forked meanwhile would have half a library.
"""

import _ctypes
import _thread
import os
import select
import struct
import sys
import time
from typing import Any, List, Optional, Sequence, Tuple

from kineto_agent.system.c_functions import Function, FunctionWithoutGil, program_function, symbol_address
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.descriptors import wake_waiter

ABI = 2  # KC_TURNS_ABI
_ENDS = -4  # KC_ORDER: the thread of the agent before this one has not ended yet
_U32 = 0xFFFFFFFF
_BEGIN_LIMIT_S = 0.02  # for the thread of an agent before this one; then there is none
_END_LIMIT_S = 1.0  # in a call of the interpreter's, which must be over before it goes; microseconds are usual
_PAUSE_S = 0.0002
_MOST_MS = (1 << 30) - 1
_OTHER = 2  # a bit of `rest`
_DESCRIPTOR = struct.Struct("=ihh")  # struct pollfd
_THREAD_OFFSET = 20  # in a struct python_turns


class _Word(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class Turns:
    """What that thread is told, and how the agent's own one begins.

    address: of a struct python_turns that is never freed; 0: there is no thread yet. library: the path of the one that
    begins it; "": nobody does.
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
        """Begin the thread, if there is none yet, for one of the agent's that is started next: see `runs`."""
        if self._words is not None or not self._library or "t" in getattr(sys, "abiflags", ""):
            return
        try:
            address = self._begun(program_function("dlopen")(os.fsencode(self._library), os.RTLD_NOW))
        except Exception:  # noqa: BLE001 - an audit hook may raise anything; the agent does without
            log_exception("turns with the GIL")
            return
        if address > 0:
            self._tell(address)
        else:
            log("no thread sees to turns with the GIL: %d", address)

    def _begun(self, library: int) -> int:
        if not library:
            return 0
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
        """Say that the calling thread is the agent's."""
        if self._words is not None:
            _Word.from_address(self._address + _THREAD_OFFSET).value = _thread.get_native_id()

    def poll(self, wanted: Sequence[Tuple[int, int]], timeout_ms: Optional[int]) -> List[Tuple[int, int]]:
        """Rest until a descriptor is ready. wanted: descriptors and masks. Returns those of what is ready."""
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
        """Make the thread end, and ask nothing more of the interpreter once this returns."""
        if self._words is None or os.getpid() != self._pid:
            return
        rest, over, queueing = self._words
        over.value = 1
        rest.value ^= _OTHER  # it might be about to sleep until this changes
        wake_waiter(self._address)
        deadline = time.monotonic() + _END_LIMIT_S
        while queueing.value and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
