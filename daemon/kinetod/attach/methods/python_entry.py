"""Runs Python source on a thread of its own in the target: the arguments of python_stub.c and gil_turns.c, and their
progress.

Theory of operation
    One page of the target holds the stub's argument with the source behind it. The stub is called with it twice: as a
    pending call, which only calls pthread_create, and as the start routine of that thread. Both write their stage,
    which explains at once why no channel appears. Setting `cancelled` makes sure that a late call does nothing.
"""

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.channel.bootstrap import lacking
from kinetod.attach.channel.payload import cannot_run
from kinetod.attach.channel.private_channel import closed_by_the_program
from kinetod.attach.inject.arch import this_machine
from kinetod.attach.inject.ptrace import LostError, StoppedThread, in_own_thread
from kinetod.attach.inject.thread_policy import PendingCallPolicy
from kinetod.attach.inspect.process_inspection import read_status
from kinetod.attach.inspect.target_image import PythonImage, TargetImage
from kinetod.attach.methods.opening_code import CODE as OPENING_CODE
from kinetod.attach.methods.python_code import CODE
from kinetod.attach.methods.turns_code import CODE as TURNS_CODE

PENDING, THREAD, WAITS, RUNS, ENDED, NO_THREAD, NO_STATE, RAISED = range(1, 9)  # enum python_stage
_HEAD = struct.Struct("<IIq")  # struct python_argument: stage, cancelled, error,
_FUNCTIONS = struct.Struct("<42Q")  # code and functions, then hushed,
_METHOD = struct.Struct("<QQqQ")  # struct python_method: name, code, flags, words
_TURNS = struct.Struct("<8IQ6Q11Qq")  # struct python_turns: state, three roles, functions, own
_TEXTS = struct.Struct("<16s8s8s16s16s16s8s8s24s96s96s")  # from builtins_name on
TURNS_OFFSET = _HEAD.size + _FUNCTIONS.size + _METHOD.size
_NATIVE_NAME_OFFSET = TURNS_OFFSET + _TURNS.size + 24
# the exception's text replaces the source
_CANCELLED_OFFSET, _SAID_OFFSET = 4, TURNS_OFFSET + _TURNS.size + _TEXTS.size
_FORMAT = b"yzkkk|OOOO"  # of native(path, symbol, address, bytes, number[, spec, name, file, modules])
_WORDS = (
    *(b"__builtins__", b"modules", b"native", _FORMAT, b"<kineto-boot>", b"_warnings", b"filters", b"ignore"),
    b"(O(ssOOi)(ssOOi))",
)
_FORK_WARNING = b"This process (pid=%d) is multi-threaded, use of %s() may lead to deadlocks in the child."
_FORKS_WARN = (3, 12)  # from this Python on
_TAKES_TUPLE = 1  # METH_VARARGS
CODES_NEEDED = 2
_BEGIN, _THREAD, _CALL = 1, 3, 4  # enum turns_role
_HANDED_OFFSET = TURNS_OFFSET + 12
_SAID_BYTES = 240
_CANCELLED = b"\1\0\0\0"
_CANCEL_S = 0.05
_ENTER_TRACING = "PyThreadState_EnterTracing"  # from 3.11 on; before, a new thread is not traced
_THREADS = ("pthread_create", "pthread_self", "pthread_detach")
_ATTRIBUTES = ("pthread_attr_init", "pthread_attr_setstacksize")
_QUEUE = "_PyEval_AddPendingCall"
_BEFORE_TRACING = ("PyInterpreterState_Main", "PyThreadState_New", "PyEval_AcquireThread")
_AFTER_TRACING = (
    *("PyThreadState_Clear", "PyThreadState_DeleteCurrent", "PyDict_New", "PyEval_GetBuiltins"),
    *("PyDict_SetItemString", "PySys_GetObject", "Py_CompileString", "PyEval_EvalCode", "Py_DecRef", "PyErr_Fetch"),
    *("PyErr_NormalizeException", "PyObject_Repr", "PyUnicode_AsUTF8", "PyErr_Clear"),
    *("PyBytes_FromStringAndSize", "PyCFunction_NewEx"),
)
_R_STATE_OFFSET = 24  # in struct r_debug, which debuggers read
_LOADER = ("dlopen", "dlsym")
_MODULES = ("PyArg_ParseTuple", "PyModule_GetDef", "PyModule_FromDefAndSpec2", "PyModule_ExecDef")
_FORK_WARNS = "PyExc_DeprecationWarning"
_FILTERS = (
    *("_Py_NoneStruct", "Py_BuildValue", "PyDict_GetItemString", "PyModule_GetDict", "PyTuple_GetItem"),
    *("PyList_Insert", "PySequence_Index", "PySequence_DelItem"),
)
_KEEP = "_PyImport_FixupExtensionObject"  # up to 3.12; later versions create every extension module anew


def codes() -> tuple[bytes, bytes, bytes]:
    """The stubs: constant, shared by all attaches to a process. The last, for turns with the GIL, may be left out."""
    machine = this_machine().name
    return CODE[machine], OPENING_CODE[machine], TURNS_CODE[machine]


def argument(
    target: TargetImage, python: PythonImage, stage: int, page: int, placed: tuple[int, ...], source: bytes
) -> bytes:
    """Packs their argument. page: its address; placed: addresses of the codes. Raises AttachError."""
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
        python.address(_FORK_WARNS) if would_be_warned(target) else 0,
        *(python.address(name) for name in _FILTERS),
        0,
    )
    turns = page + TURNS_OFFSET
    method = _METHOD.pack(page + _NATIVE_NAME_OFFSET, opening, _TAKES_TUPLE, 0)
    process = int(read_status(target.proc).get("NSpid", str(target.pid)).split()[-1])
    head = _HEAD.pack(stage, 0, process) + _FUNCTIONS.pack(*functions) + method + _turns(target, python, turns, others)
    given = b"turns,syscall,dlopen,dlsym=%d,%d,%d,%d\n" % (turns, target.libc_symbol("syscall"), *loader)
    warnings = [_FORK_WARNING % (process, call) for call in (b"fork", b"forkpty")]
    return head + _TEXTS.pack(*_WORDS, *warnings) + given + source + b"\0"


def would_be_warned(target: TargetImage) -> bool:
    """Whether its forks would warn because of our threads alone; the same throughout an attach."""
    return target.python is not None and target.python.version[:2] >= _FORKS_WARN and target.one_threaded


def _turns(target: TargetImage, python: PythonImage, address: int, placed: Sequence[int]) -> bytes:
    queue = python.symbol(_QUEUE)  # private, but exported by all supported versions; optional
    code = placed[0] if placed and queue is not None else 0
    return _TURNS.pack(
        *(0,) * 9,
        *(_BEGIN, address, _THREAD, address, _CALL, address),
        *(code, *(target.libc_symbol(name) for name in (*_ATTRIBUTES, *_THREADS))),
        *(python.address("PyInterpreterState_Main"), python.address("Py_IsInitialized")),
        queue[0] if queue is not None else 0,
        *(python.address("PyEval_SaveThread"), python.address("PyEval_RestoreThread"), 0),
    )


@dataclass(frozen=True, slots=True)
class Handed:
    """One argument that was handed over."""

    target: TargetImage
    address: int

    def cancel(self) -> None:
        """Makes every call that has not begun do nothing. If this cannot be written without a stop, and no thread stops
        in time, the call opens its channel, waits for us in vain and ends.
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

    def stage(self) -> int:
        """Returns how far it has come, an enum python_stage; 0: no longer readable."""
        with contextlib.suppress(OSError, AttachError):
            return self.target.memory.u32(self.address)
        return 0

    def turns_given(self) -> int:
        """Returns how often the program's threads have given up the GIL for ours."""
        return int.from_bytes(self.target.memory.read(self.address + _HANDED_OFFSET, 4), "little")

    def problem(self) -> AttachError | None:
        """Explains why no channel will appear. None: one still may."""
        try:
            stage, _cancelled, error = _HEAD.unpack(self.target.memory.read(self.address, _HEAD.size))
            said = self.target.memory.read(self.address + _SAID_OFFSET, _SAID_BYTES) if stage == RAISED else b""
        except (OSError, AttachError):  # it has ended; other code reports that better
            return None
        pid = self.target.pid
        if stage == NO_THREAD:
            return no_thread(pid, error)
        if stage == NO_STATE:
            reason = f"the interpreter of process {pid} has no memory left for a thread: raise its limit ('ulimit -v')"
            return AttachError(AttachCode.LIMIT, reason)
        if stage == RAISED:
            words = said.partition(b"\0")[0].decode("utf-8", "replace")
            words = "".join(char for char in words if char.isprintable())
            return lacking(pid, words) or cannot_run(pid, words)
        if stage == ENDED:
            return closed_by_the_program(pid)
        return None


class PythonEntry:
    """What the methods have in common: the most recent argument."""

    def __init__(self) -> None:
        self.handed: Handed | None = None

    def begun(self) -> bool:
        """See Method."""
        return self.handed is not None and self.handed.stage() in (THREAD, WAITS, RUNS, ENDED)

    def nameless(self) -> bool:
        """See Method."""
        return self.handed is not None and self.handed.stage() == THREAD

    def problem(self) -> AttachError | None:
        """See Method."""
        return self.handed.problem() if self.handed is not None else None

    def finish(self) -> None:
        """Makes what has not begun yet, or waits for the GIL, do nothing any more."""
        if self.handed is not None:
            self.handed.cancel()
        self.handed = None


def no_thread(pid: int, error: int) -> AttachError:
    """Error for a pthread_create that failed with this errno."""
    return AttachError(
        AttachCode.LIMIT,
        f"process {pid} cannot start a thread: {os.strerror(error)}; raise its limit on threads"
        " (pids.max of its control group, 'ulimit -u') or on address space ('ulimit -v'), or lower its stack limit"
        " ('ulimit -s'), which is the stack size of every new thread",
    )
