"""Decides which thread of the target may be redirected, and at which points.

Theory of operation
    pending call   Py_AddPendingCall takes one lock of the interpreter. A thread that holds it must not be redirected:
                   it would deadlock. A thread parked in a blocking system call does not hold it, nor does the main
                   thread between two bytecodes (pc in the evaluation loop) or in an extension's code.
    native thread  pthread_create allocates and takes locks of the loader. So: a thread parked in a call in which no
                   low-level lock waits, or one whose innermost code is a module that is neither the allocator
                   (exports malloc), nor the C library, nor the loader. The interpreter's own locks do not matter: the
                   new thread waits for them, not the redirected one.
    No thread is stopped in a call that the stop itself would end early: the main thread may wait in some more calls
    (recv, accept, epoll_wait, sigwaitinfo), but without a time limit, since such a call starts over. A thread that
    enters one with a time limit on the way to the stop may be used: hardly any of its time has passed. Python's own
    epoll.poll() may be interrupted: it continues with the remaining time (PEP 475). A parked thread other than the main
    one is always better: training is not stopped at all.
"""

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.channel.private_channel import take_descriptor
from kinetod.attach.inject.arch import InterruptedCall, Machine, Point, this_machine
from kinetod.attach.inject.ptrace import job_stopped, traced
from kinetod.attach.inspect.process_inspection import read_status, thread_seccomp
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.inspect.target_memory import gone

EVALUATION_LOOP = "_PyEval_EvalFrameDefault"
_UNUSABLE_STATES = "ZXtTD"
_TIMEVAL_BYTES = 16
_CALLER_BYTES = 256  # of the stack: by far more than epoll_wait of a C library uses
# On the way to the call, and code without a file, as ours is.
_NO_CALLER = re.compile(r"(?:(?:libc|libpthread|ld)[-.].*|\[vdso\])?")
_OWN_MODULES = "/lib-dynload/"  # of which select calls it


class ThreadPolicy(Protocol):
    """Decides which threads to try and whether a stopped one is at a good point."""

    def candidates(self) -> Iterator[int]:
        """Yields thread ids to try, best first."""

    def accepts(self, tid: int, point: Point) -> bool:
        """Whether the thread may be redirected from there."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts from /proc/PID/status."""

    state: str
    tracer: int
    filtered: bool  # has a seccomp filter
    shadow_stack: bool


def read_facts(image: TargetImage) -> Facts:
    """Reads the facts of the main thread. Raises AttachError if the process is gone."""
    fields = read_status(image.proc)
    if not fields:
        raise gone(image.pid)
    return Facts(
        state=fields["State"][:1],
        tracer=int(fields["TracerPid"]),
        filtered=fields.get("Seccomp", "0") != "0",
        shadow_stack="shstk" in fields.get("x86_Thread_features", "").split(),
    )


def refuse_unsuitable(image: TargetImage, facts: Facts) -> None:
    """Raises AttachError for every reason that is visible without a stop."""
    if facts.tracer:
        raise traced(image.pid, facts.tracer)
    if facts.state == "T":
        raise job_stopped(image.pid)
    if facts.state in "ZX" and len(thread_ids(image)) < 2:
        raise AttachError(AttachCode.GONE, f"process {image.pid} has ended, but its parent has not reaped it yet")
    if facts.shadow_stack:
        raise AttachError(
            AttachCode.UNSUPPORTED,
            f"process {image.pid} runs with a user shadow stack; start it without one "
            "(GLIBC_TUNABLES=glibc.cpu.x86_shstk=off)",
        )


def thread_ids(image: TargetImage) -> list[int]:
    """Returns the ids of all threads. Raises AttachError when the process is gone."""
    try:
        return sorted(int(name) for name in os.listdir(image.proc / "task"))  # noqa: PTH208 -- in a hurry
    except OSError:
        raise gone(image.pid) from None


def thread_state(image: TargetImage, tid: int) -> str:
    """Returns the state letter, as in ps; X when the thread has ended."""
    try:
        with open(image.proc / "task" / str(tid) / "stat", "rb") as stat:  # noqa: PTH123 -- in a hurry
            return stat.read().rpartition(b")")[2].split(None, 1)[0].decode()
    except (OSError, IndexError):
        return "X"


def parked_call(image: TargetImage, tid: int, machine: Machine) -> InterruptedCall | None:
    """Returns the restartable call that the thread is blocked in; None also if that cannot be read."""
    call = standing_call(image, tid)
    return machine.parked_call(call.number, call.arguments) if call is not None else None


def standing_call(image: TargetImage, tid: int) -> InterruptedCall | None:
    """Returns the call that the thread is blocked in; None if it runs or has ended."""
    fields = _standing(image, tid)
    return InterruptedCall(fields[0], fields[1:7]) if fields else None


def _standing(image: TargetImage, tid: int) -> tuple[int, ...]:
    """Returns the call that the thread is blocked in, its six arguments, stack pointer and program counter; () if it
    runs.
    """
    with contextlib.suppress(OSError, ValueError), open(image.proc / "task" / str(tid) / "syscall", "rb") as file:  # noqa: PTH123
        number, *fields = file.read().split()
        if len(fields) == 8:  # otherwise it runs
            return (int(number), *(int(field, 16) for field in fields))
    return ()


def takes_eintr(image: TargetImage, tid: int) -> bool:
    """Whether the thread waits, with a time limit, in an epoll_wait called by Python's own epoll.poll().

    The caller is somewhere in the top of the stack, among addresses that earlier calls have left there. So all that lie
    in code must be Python's own.
    """
    fields = _standing(image, tid)
    machine = this_machine()
    if not fields or image.python is None or not machine.waiting_calls.get(fields[0], "").startswith("epoll"):
        return False
    if machine.waiting_call(fields[0], fields[1:7]) is not None:  # no time limit: the kernel repeats it unchanged
        return False
    with contextlib.suppress(AttachError, OSError):
        stack = image.memory.read(fields[7], _CALLER_BYTES)
        words = [word for (word,) in struct.iter_unpack("<Q", stack[: len(stack) // 8 * 8])]
        code = {each.path for each in map(image.mapping_at, words) if each is not None and "x" in each.permissions}
        callers = [path for path in code if not _NO_CALLER.fullmatch(path.rpartition("/")[2])]
        return bool(callers) and all(path == image.python.path or _OWN_MODULES in path for path in callers)
    return False


def why_none(image: TargetImage) -> str:
    """Explains why no thread may be stopped, by the call that the main thread is in now."""
    call, machine = standing_call(image, image.pid), this_machine()
    if call is None or call.number in machine.parked_calls:
        return "no thread is at a point where code can be injected safely"
    name = machine.waiting_calls.get(call.number, f"system call {call.number}")
    limited = " with a time limit" if name.startswith("epoll") else ""
    return (
        f"its main thread is waiting in {name}{limited}; stopping it would end that call early (EINTR), and code "
        "cannot be injected through any other thread until the main thread wakes up"
    )


def _main_may_be_stopped(image: TargetImage, machine: Machine) -> bool:
    """Whether it is not in a call that would return early, be it with EINTR or with less than was asked for."""
    if thread_state(image, image.pid) in _UNUSABLE_STATES:
        return False
    call = standing_call(image, image.pid)
    if call is None or machine.parked_call(call.number, call.arguments) is not None:
        return True
    if machine.waiting_call(call.number, call.arguments) is None:
        return takes_eintr(image, image.pid)
    name = machine.waiting_calls[call.number]
    return name in ("pause", "rt_sigtimedwait") or name.startswith("epoll") or _waits_for_good(image, call.arguments[0])


def _waits_for_good(image: TargetImage, descriptor: int) -> bool:
    """Whether reading it has no time limit and cannot be part of work under a lock of the loader (a file)."""
    try:
        name = os.readlink(image.proc / "fd" / str(descriptor))  # noqa: PTH115
        if not name.startswith("socket:"):
            return name.startswith(("pipe:", "anon_inode:", "/dev/"))
        process = os.pidfd_open(image.pid)
        try:
            with socket.socket(fileno=take_descriptor(process, image.pid, descriptor)) as copy:
                return not any(copy.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL_BYTES))
        finally:
            os.close(process)
    except (OSError, AttachError):
        return False


class PendingCallPolicy:
    """Chooses threads for functions that take only the interpreter's pending-call lock."""

    def __init__(self, image: TargetImage) -> None:
        self._image = image
        self._machine = this_machine()
        loop = image.python.symbol(EVALUATION_LOOP) if image.python is not None else None
        self._loop = range(loop[0], loop[0] + loop[1]) if loop is not None else range(0)

    def candidates(self) -> Iterator[int]:
        """Yields parked threads, then the main thread."""
        yield from _parked(self._image, self._machine)
        if _main_may_be_stopped(self._image, self._machine):
            yield self._image.pid

    def accepts(self, tid: int, point: Point) -> bool:
        """See the theory of operation."""
        if point.call is not None or tid != self._image.pid:
            return point.call is not None
        return point.pc in self._loop or _in_an_extension(self._image, point.pc)


class NativeThreadPolicy:
    """Chooses threads for functions that allocate memory."""

    def __init__(self, image: TargetImage) -> None:
        self._image = image
        self._machine = this_machine()

    def candidates(self) -> Iterator[int]:
        """Yields parked threads, the main thread last of them; then running ones."""
        main = self._image.pid
        for tid in (*_parked(self._image, self._machine), main):
            call = standing_call(self._image, tid)
            if call is None or (tid == main and not _main_may_be_stopped(self._image, self._machine)):
                continue
            if self._machine.holds_no_low_level_lock(call):
                yield tid
        for tid in thread_ids(self._image):
            if thread_state(self._image, tid) == "R" and _has_main_filters(self._image, tid):
                yield tid

    def accepts(self, tid: int, point: Point) -> bool:
        """See the theory of operation."""
        if point.call is not None:
            return self._machine.holds_no_low_level_lock(point.call)
        return _in_no_allocator(self._image, point.pc)


def _in_no_allocator(image: TargetImage, pc: int) -> bool:
    """Whether pc lies in a module that is neither an allocator nor the C library nor the loader."""
    mapping = image.mapping_at(pc)
    if mapping is None or not mapping.is_file:
        return False
    return (
        mapping.path in image.modules
        and mapping.path not in image.loader_modules
        and not image.exports(mapping.path, "malloc")
    )


def _in_an_extension(image: TargetImage, pc: int) -> bool:
    """Whether pc lies in such a module, and not in the interpreter."""
    mapping = image.mapping_at(pc)
    interpreter = image.python.path if image.python is not None else ""
    return mapping is not None and mapping.path != interpreter and _in_no_allocator(image, pc)


def _parked(image: TargetImage, machine: Machine) -> Iterator[int]:
    for tid in thread_ids(image):
        if tid != image.pid and parked_call(image, tid, machine) is not None and _has_main_filters(image, tid):
            yield tid


def _has_main_filters(image: TargetImage, tid: int) -> bool:
    """Whether the thread has as many seccomp filters as the main one, whose filters were checked (preconditions.py)."""
    return thread_seccomp(image.pid, tid) == thread_seccomp(image.pid, image.pid)
