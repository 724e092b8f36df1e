"""Python source on a thread of its own in the target: what python_stub.c and gil_turns.c are given, and what became
of it.

Theory of operation
    One page of the target holds the stub's argument with the source behind it. The stub is called with it twice: as
    a pending call, which does nothing but pthread_create, and as the start routine of that thread. Both write how far
    they have come. Whoever reads that knows at once why no channel appears; whoever writes `cancelled` makes sure that
    a call that comes late does nothing.
"""

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.channel.bootstrap import LACKING
from kinetod.attach.channel.private_channel import closed_by_the_program
from kinetod.attach.inject.arch import this_machine
from kinetod.attach.inject.ptrace import LostError, StoppedThread, in_own_thread
from kinetod.attach.inject.thread_policy import PendingCallPolicy
from kinetod.attach.inspect.target_image import PythonImage, TargetImage
from kinetod.attach.methods.opening_code import CODE as OPENING_CODE
from kinetod.attach.methods.python_code import CODE
from kinetod.attach.methods.turns_code import CODE as TURNS_CODE

PENDING, THREAD, WAITS, RUNS, ENDED, NO_THREAD, NO_STATE, RAISED = range(1, 9)  # enum python_stage
_HEAD = struct.Struct("<IIq")  # struct python_argument: stage, cancelled, error,
_FUNCTIONS = struct.Struct("<31Q")  # code and functions,
_METHOD = struct.Struct("<QQqQ")  # struct python_method: name, code, flags, words
_TURNS = struct.Struct("<8IQ6Q11Q")  # struct python_turns: the agent's thread, what it does, three roles, functions
_TEXTS = struct.Struct("<16s8s8s16s")  # builtins_name, modules_name, native_name and format
TURNS_OFFSET = _HEAD.size + _FUNCTIONS.size + _METHOD.size
_NATIVE_NAME_OFFSET = TURNS_OFFSET + _TURNS.size + 24
_CANCELLED_OFFSET, _SAID_OFFSET = 4, TURNS_OFFSET + _TURNS.size + _TEXTS.size  # where the source was
_FORMAT = b"yzkkk|OOOO"  # of native(path, symbol, address, bytes, number[, spec, name, file, modules])
_TAKES_TUPLE = 1  # METH_VARARGS
CODES_NEEDED = 2
_BEGIN, _THREAD, _CALL = 1, 3, 4  # enum turns_role
_HANDED_OFFSET = TURNS_OFFSET + 12
_SAID_BYTES = 240
_CANCELLED = b"\1\0\0\0"
_CANCEL_S = 0.05
_ENTER_TRACING = "PyThreadState_EnterTracing"  # from 3.11 on; before, a new thread is traced by nobody
_THREADS = ("pthread_create", "pthread_self", "pthread_detach")
_ATTRIBUTES = ("pthread_attr_init", "pthread_attr_setstacksize")
_QUEUE = "_PyEval_AddPendingCall"
_BEFORE_TRACING = ("PyInterpreterState_Main", "PyThreadState_New", "PyEval_AcquireThread")
_AFTER_TRACING = (
    *("PyThreadState_Clear", "PyThreadState_DeleteCurrent", "PyDict_New", "PyEval_GetBuiltins"),
    *("PyDict_SetItemString", "PySys_GetObject", "PyRun_StringFlags", "Py_DecRef", "PyErr_Fetch"),
    *("PyErr_NormalizeException", "PyObject_Repr", "PyUnicode_AsUTF8", "PyErr_Clear"),
    *("PyBytes_FromStringAndSize", "PyCFunction_NewEx"),
)
_R_STATE_OFFSET = 24  # in struct r_debug, which debuggers read
_LOADER = ("dlopen", "dlsym")
_MODULES = ("PyArg_ParseTuple", "PyModule_GetDef", "PyModule_FromDefAndSpec2", "PyModule_ExecDef")
_KEEP = "_PyImport_FixupExtensionObject"  # up to 3.12; later ones make every extension module anew


def codes() -> tuple[bytes, bytes, bytes]:
    """The stubs: constant, shared by all attaches to a process. The last, for turns with the GIL, may be left out."""
    machine = this_machine().name
    return CODE[machine], OPENING_CODE[machine], TURNS_CODE[machine]


def argument(
    target: TargetImage, python: PythonImage, stage: int, page: int, placed: tuple[int, ...], source: bytes
) -> bytes:
    """What they are given. page: where it will lie; placed: where the codes lie. Raises AttachError."""
    address, opening, *others = placed
    tracing, keep = python.symbol(_ENTER_TRACING), python.symbol(_KEEP)
    debug = target.symbol_in(("ld-", "ld."), "_r_debug")
    loader = [target.libc_symbol(name) for name in _LOADER]
    functions = (
        address,
        *(target.libc_symbol(name) for name in _THREADS),
        *(python.address(name) for name in _BEFORE_TRACING),
        tracing[0] if tracing is not None else 0,
        *(python.address(name) for name in _AFTER_TRACING),
        *loader,
        *(python.address(name) for name in _MODULES),
        keep[0] if keep is not None else 0,
        debug[0] + _R_STATE_OFFSET if debug is not None else 0,
    )
    turns = page + TURNS_OFFSET
    method = _METHOD.pack(page + _NATIVE_NAME_OFFSET, opening, _TAKES_TUPLE, 0)
    head = _HEAD.pack(stage, 0, 0) + _FUNCTIONS.pack(*functions) + method + _turns(target, python, turns, others)
    given = b"turns,syscall,dlopen,dlsym=%d,%d,%d,%d\n" % (turns, target.libc_symbol("syscall"), *loader)
    return head + _TEXTS.pack(b"__builtins__", b"modules", b"native", _FORMAT) + given + source + b"\0"


def _turns(target: TargetImage, python: PythonImage, address: int, placed: Sequence[int]) -> bytes:
    queue = python.symbol(_QUEUE)  # private, but exported by all that are supported; without it we do without
    code = placed[0] if placed and queue is not None else 0
    return _TURNS.pack(
        *(0,) * 9,
        *(_BEGIN, address, _THREAD, address, _CALL, address),
        *(code, *(target.libc_symbol(name) for name in (*_ATTRIBUTES, *_THREADS))),
        *(python.address("PyInterpreterState_Main"), python.address("Py_IsInitialized")),
        queue[0] if queue is not None else 0,
        *(python.address("PyEval_SaveThread"), python.address("PyEval_RestoreThread")),
    )


@dataclass(frozen=True, slots=True)
class Handed:
    """One that was handed over."""

    target: TargetImage
    address: int

    def cancel(self) -> None:
        """Whoever has not begun yet does nothing. Where that cannot be written without a stop, and no thread stops in
        time, it opens its channel, waits for us in vain and ends.
        """
        memory = self.target.memory
        with contextlib.suppress(OSError, AttachError):
            if memory.writes:
                memory.write(self.address + _CANCELLED_OFFSET, _CANCELLED)
                return
            if memory.u32(self.address) in (PENDING, THREAD, WAITS):
                in_own_thread(self._cancel_in_a_stop)

    def _cancel_in_a_stop(self) -> None:
        policy, end = PendingCallPolicy(self.target), time.monotonic() + _CANCEL_S
        for tid in policy.candidates():
            with contextlib.suppress(LostError), StoppedThread(self.target.pid, tid) as thread:
                thread.check(self.target.approved)
                thread.poke(self.address, self.target.memory.read(self.address, _CANCELLED_OFFSET) + _CANCELLED)
                return
            if time.monotonic() > end:
                return

    def turns_given(self) -> int:
        """How often the program's threads have given the GIL away for ours."""
        return int.from_bytes(self.target.memory.read(self.address + _HANDED_OFFSET, 4), "little")

    def problem(self) -> AttachError | None:
        """Why no channel will appear, if none has. None: one may."""
        try:
            stage, _cancelled, error = _HEAD.unpack(self.target.memory.read(self.address, _HEAD.size))
            said = self.target.memory.read(self.address + _SAID_OFFSET, _SAID_BYTES) if stage == RAISED else b""
        except (OSError, AttachError):  # it has ended; others tell that better
            return None
        pid = self.target.pid
        if stage == NO_THREAD:
            return no_thread(pid, error)
        if stage == NO_STATE:
            reason = f"the interpreter of process {pid} has no memory left for a thread: raise its limits ('ulimit -v')"
            return AttachError(AttachCode.LIMIT, reason)
        if stage == RAISED:
            words = said.partition(b"\0")[0].decode("utf-8", "replace")
            words = "".join(char for char in words if char.isprintable())
            if LACKING in words:
                return lacking(pid, words)
            reason = f"process {pid} does not let the agent's code run: {words}. Does one of its audit hooks forbid it?"
            return AttachError(AttachCode.UNSUITABLE, reason)
        if stage == ENDED:
            return closed_by_the_program(pid)
        return None


def lacking(pid: int, words: str) -> AttachError:
    """The interpreter lacks a module of its standard library; `words`: of the exception, which names the module."""
    return AttachError(
        AttachCode.UNSUPPORTED,
        f"Python in process {pid} does not find its standard library, which the agent needs ({words}): was its "
        "environment removed or moved while it ran, is the program frozen (cx_Freeze), or was the interpreter built "
        "without libffi (no _ctypes)? Restart it from a complete environment, or call kineto_agent.start() in it",
    )


def no_thread(pid: int, error: int) -> AttachError:
    """pthread_create failed with that error number."""
    return AttachError(
        AttachCode.LIMIT,
        f"process {pid} cannot start a thread: {os.strerror(error)}; raise its limit on threads"
        " (pids.max of its control group, 'ulimit -u') or on address space ('ulimit -v'), or lower its stack limit"
        " ('ulimit -s'), which is the stack size of every new thread",
    )
