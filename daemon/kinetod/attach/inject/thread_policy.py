"""Which thread of the target may be redirected, and at which points.

Theory of operation
    pending call   Py_AddPendingCall takes one lock of the interpreter. A thread that holds it must not be redirected:
                   it would wait for itself. A thread parked in a blocking system call does not hold it, nor does the
                   main thread between two bytecodes (pc in the evaluation loop).
    native thread  pthread_create allocates and takes locks of the loader. So: a thread parked in a call in which no
                   low-level lock waits, or one whose innermost code is a module that is neither the allocator
                   (exports malloc), nor the C library, nor the loader. The interpreter's own locks do not matter: the
                   new thread waits for them, not the redirected one.
    Nobody is stopped in a call that the stop itself would end early: the main thread may wait in some more calls
    (recv, accept, epoll_wait), but without a time limit, since such a call starts from anew.
    A bystander, parked, is always better than the main thread: training is not stopped at all.
"""

import contextlib
import os
import socket
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


class ThreadPolicy(Protocol):
    """Which threads to try, best first, and whether the point where one stopped is good."""

    def candidates(self) -> Iterator[int]:
        """The ids of threads to try, best first."""

    def accepts(self, tid: int, point: Point) -> bool:
        """Whether the thread may be redirected from there."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What /proc/PID/status says."""

    state: str
    tracer: int
    filtered: bool  # has a seccomp filter
    shadow_stack: bool


def read_facts(image: TargetImage) -> Facts:
    """The facts of the main thread. Raises AttachError if the process is gone."""
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
    """All threads at the moment; raises AttachError when the process is gone."""
    try:
        return sorted(int(name) for name in os.listdir(image.proc / "task"))  # noqa: PTH208 -- in a hurry
    except OSError:
        raise gone(image.pid) from None


def thread_state(image: TargetImage, tid: int) -> str:
    """One letter, as in ps; X when it has ended."""
    try:
        with open(image.proc / "task" / str(tid) / "stat", "rb") as stat:  # noqa: PTH123 -- in a hurry
            return stat.read().rpartition(b")")[2].split(None, 1)[0].decode()
    except (OSError, IndexError):
        return "X"


def parked_call(image: TargetImage, tid: int, machine: Machine) -> InterruptedCall | None:
    """The restartable call that the thread stands in. None as well when it may not be known."""
    call = _standing_call(image, tid)
    return machine.parked_call(call.number, call.arguments) if call is not None else None


def _standing_call(image: TargetImage, tid: int) -> InterruptedCall | None:
    """The call that the thread stands in, whichever it is."""
    with contextlib.suppress(OSError, ValueError), open(image.proc / "task" / str(tid) / "syscall", "rb") as file:  # noqa: PTH123
        fields = file.read().split()
        if len(fields) == 9:  # else: running
            return InterruptedCall(int(fields[0]), tuple(int(field, 16) for field in fields[1:7]))
    return None


def _main_may_be_stopped(image: TargetImage, machine: Machine) -> bool:
    """Not in a call that would return early, be it with EINTR or with less than was asked for."""
    if thread_state(image, image.pid) in _UNUSABLE_STATES:
        return False
    call = _standing_call(image, image.pid)
    if call is None or machine.parked_call(call.number, call.arguments) is not None:
        return True
    if machine.waiting_call(call.number, call.arguments) is None:
        return False
    name = machine.waiting_calls[call.number]
    return name == "pause" or name.startswith("epoll") or _waits_for_good(image, call.arguments[0])


def _waits_for_good(image: TargetImage, descriptor: int) -> bool:
    """Whether reading it has no time limit, and is not part of what holds a lock of the loader (a file)."""
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
        """Bystanders that are parked, then the main thread."""
        yield from _parked(self._image, self._machine)
        if _main_may_be_stopped(self._image, self._machine):
            yield self._image.pid

    def accepts(self, tid: int, point: Point) -> bool:
        """See the theory of operation."""
        return point.call is not None or (tid == self._image.pid and point.pc in self._loop)


class NativeThreadPolicy:
    """Chooses threads for functions that allocate memory."""

    def __init__(self, image: TargetImage) -> None:
        self._image = image
        self._machine = this_machine()

    def candidates(self) -> Iterator[int]:
        """Threads that are parked, the main thread last of them; then whatever runs."""
        main = self._image.pid
        for tid in (*_parked(self._image, self._machine), main):
            call = _standing_call(self._image, tid)
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
        mapping = self._image.mapping_at(point.pc)
        if mapping is None or not mapping.is_file:
            return False
        image = self._image
        return (
            mapping.path in image.modules
            and mapping.path not in image.loader_modules
            and not image.exports(mapping.path, "malloc")
        )


def _parked(image: TargetImage, machine: Machine) -> Iterator[int]:
    for tid in thread_ids(image):
        if tid != image.pid and parked_call(image, tid, machine) is not None and _has_main_filters(image, tid):
            yield tid


def _has_main_filters(image: TargetImage, tid: int) -> bool:
    """Whether the thread has as many seccomp filters as the main one, which have been looked at (preconditions.py)."""
    return thread_seccomp(image.pid, tid) == thread_seccomp(image.pid, image.pid)
