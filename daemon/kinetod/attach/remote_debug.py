"""CPython 3.14 and later: the interpreter's own slot for a debugger's script (PEP 768). No thread is stopped.

Theory of operation
    Each thread of the interpreter has a slot: the path of a script and a flag. A thread that sees the flag at a
    safe point (between two bytecodes, or when a system call was interrupted) clears it, copies the path, reads the
    file and runs it in a namespace of its own. We write path and flag into the main thread's slot by /proc/PID/mem
    and make the thread look by its "eval breaker". `sys.remote_exec` does the same, but only from the same minor
    version, only if it finds the interpreter's file in its own mount namespace, and it writes the whole eval breaker.

    The eval breaker's low byte has one bit per kind of event; whoever sets or clears one does so atomically, which we
    cannot. Between our reading and our writing the interpreter may change it. So the byte is written such that
    neither a lost nor a repeated event matters:
        set always       signals, pending calls, asynchronous exception: looked up elsewhere, nothing happens if there
                         is none, so none can be lost. Any of them makes the thread look at the slot.
        cleared always   request for the GIL: repeated it would make the thread wait until another one takes the GIL,
                         for ever if none wants it; lost, the waiting thread asks again after 5 ms.
                         collection due: asked for again with the next object.
        as it was        stop of the world, merge of reference counts, cold JIT code: not used by builds with a GIL, or
                         harmless both ways.
    The other bytes (version of the instrumentation) are not written.

    Only the thread that runs the main program is aimed at: its state lies in the interpreter's own memory until the
    process ends, where that of another thread is freed when it ends, perhaps just before we write. And there is such
    a thread only between the end of the initialisation and the begin of the shutdown, which spares us both.

    The script is a file, so `finish` must be called when it has run or is given up: it takes the flag back first and
    removes the file then. What a killed helper has left (a flag, a file) is taken over by the next attach, which finds
    its name in the slot.
"""

import contextlib
import errno
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kinetod.attach import script_file
from kinetod.attach.debug_offsets import MAX_SCRIPT_PATH_BYTES, TABLE_BYTES, DebugOffsets, decode
from kinetod.attach.image import TargetImage
from kinetod.attach.interface import AttachCode, AttachError, Bootstrap, Deadline, Stop

FIRST_VERSION = (3, 14)
# From the flag's being cleared by the interpreter until the file is open, with room for a busy machine.
OPENING_S = 0.02
MAX_INTERPRETERS = 10_000

# Bits of the eval breaker (Include/internal/pycore_ceval.h), the same in 3.14 and 3.15.
_GIL_DROP_REQUEST, _SIGNALS_PENDING, _CALLS_TO_DO, _ASYNC_EXCEPTION, _GC_SCHEDULED = (1 << bit for bit in range(5))
_ALWAYS_SET = _SIGNALS_PENDING | _CALLS_TO_DO | _ASYNC_EXCEPTION
_NEVER_SET = _GIL_DROP_REQUEST | _GC_SCHEDULED


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The main thread's, by addresses in the target."""

    flag: int
    path: int
    eval_breaker: int


class RemoteDebug:
    """One at a time: `finish` ends what `hand_over` has begun."""

    name = "remote_debug"

    def __init__(self) -> None:
        self._target: TargetImage | None = None
        self._slot: Slot | None = None
        self._file: script_file.ScriptFile | None = None

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """Raises AttachError: UNSUPPORTED where the interpreter has no slot, FAILED where it cannot be used now."""
        del deadline  # nothing here waits for the target
        self.finish()
        with _explained(target.pid):
            slot = find_slot(target)
            _take_over(target, slot)
            self._file = _place(target, slot, bootstrap)
            try:
                self._target, self._slot = target, slot
                target.memory.write(slot.flag, struct.pack("<i", 1))
                wake(target, slot)
            except BaseException:
                self.finish()
                raise
        return Stop()

    def finish(self) -> None:
        """Take the script back: it has run, or shall not run any more. Idempotent."""
        if self._target is not None and self._slot is not None:
            with contextlib.suppress(OSError, AttachError):
                _clear(self._target, self._slot)
        if self._file is not None:
            self._file.remove()
        self._target = self._slot = self._file = None


def find_slot(target: TargetImage) -> Slot:
    """Raises AttachError, and OSError where the interpreter's structures lead to no memory."""
    python = target.python
    if python is None or python.version[:2] < FIRST_VERSION:
        raise _unsupported(target.pid, "it does not run CPython 3.14 or later")
    found = python.symbol("_PyRuntime")
    if found is None:
        raise _unsupported(target.pid, f"{python.path} does not export _PyRuntime")
    runtime, size = found
    try:
        offsets = decode(target.memory.read(runtime, TABLE_BYTES), size)
    except ValueError as exc:
        raise _unsupported(target.pid, str(exc)) from exc
    interpreter = _main_interpreter(target, runtime, offsets)
    if target.memory.u32(interpreter + offsets.remote_debugging_enabled) != 1:
        raise _unsupported(
            target.pid,
            "remote debugging is switched off (PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug, or its build)",
        )
    thread = target.memory.u64(interpreter + offsets.threads_main)
    if not thread or target.memory.u64(runtime + offsets.finalizing):
        raise _failed(target.pid, "it does not run a main program: it starts or ends, or Python is embedded in it")
    if target.memory.u64(thread + offsets.thread_interpreter) != interpreter:
        raise _unsupported(target.pid, "the state of its main thread is not where its debug offsets say")
    return Slot(
        flag=thread + offsets.pending_call,
        path=thread + offsets.script_path,
        eval_breaker=thread + offsets.eval_breaker,
    )


def _place(target: TargetImage, slot: Slot, bootstrap: Bootstrap) -> script_file.ScriptFile:
    """The file. Its path is in the slot before it exists: so the next attach finds it if we are killed meanwhile."""

    def note(path: str) -> None:
        text = os.fsencode(path) + b"\0"
        if len(text) > MAX_SCRIPT_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        target.memory.write(slot.path, text)

    try:
        return script_file.place(target.pid, bootstrap.token, bootstrap.source, note)
    except OSError as exc:
        raise _failed(target.pid, f"no directory takes a script that it could read ({exc})") from exc


def wake(target: TargetImage, slot: Slot) -> None:
    """Make the thread look at its slot at the next safe point."""
    (before,) = target.memory.read(slot.eval_breaker, 1)  # the lowest byte: both machines are little-endian
    target.memory.write(slot.eval_breaker, bytes([before & ~_NEVER_SET | _ALWAYS_SET]))


def _main_interpreter(target: TargetImage, runtime: int, offsets: DebugOffsets) -> int:
    """The newest one is the head of the list, the main one its end."""
    interpreter = target.memory.u64(runtime + offsets.interpreters_head)
    for _ in range(MAX_INTERPRETERS):
        if not interpreter:
            break
        if target.memory.u64(interpreter + offsets.interpreter_id) == 0:
            return interpreter
        interpreter = target.memory.u64(interpreter + offsets.next_interpreter)
    raise _failed(target.pid, "its interpreter is not initialised yet or has ended")


def _take_over(target: TargetImage, slot: Slot) -> None:
    """Clear away what a killed helper has left. Raises AttachError if another tool's script waits."""
    text = target.memory.read(slot.path, MAX_SCRIPT_PATH_BYTES).partition(b"\0")[0]
    path = os.fsdecode(text)
    if target.memory.u32(slot.flag):
        if not script_file.is_ours(path):
            raise _failed(target.pid, f"another tool's script waits to be run in it ({path})")
        _clear(target, slot)
    script_file.remove(target.pid, path)


def _clear(target: TargetImage, slot: Slot) -> None:
    """Take the flag back; the interpreter may have seen it just before, and is given the time to open the file."""
    if target.memory.u32(slot.flag):
        target.memory.write(slot.flag, struct.pack("<i", 0))
        time.sleep(OPENING_S)


@contextlib.contextmanager
def _explained(pid: int) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _failed(pid, f"its interpreter's memory cannot be read or written ({exc})") from exc


def _unsupported(pid: int, why: str) -> AttachError:
    return AttachError(AttachCode.UNSUPPORTED, f"process {pid} takes no debugger's script: {why}")


def _failed(pid: int, why: str) -> AttachError:
    return AttachError(AttachCode.FAILED, f"process {pid} takes no debugger's script now: {why}")
