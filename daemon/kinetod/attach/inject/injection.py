"""Makes one thread of the target call one function with a single stop; nothing has to be undone from outside.

Theory of operation
    1. Without a stop: read facts, find a place for the trampoline in a code cave and an address for the region. Nothing
       is written: an execve may have made the process another user's.
    2. Stop one thread and check its point. Bad: release it and retry a little later. Good: compare the process with
       what was approved (user, rights, program). From here on every write goes to that memory, by a descriptor that was
       opened for it, or through the thread (ptrace.py). Both fail after an execve by another of its threads.
    3. Write the trampoline into its cave and the frame below the stack's red zone, then set the registers to the
       trampoline, once, and release the thread. If we are killed before, nothing that matters has changed; after that
       the thread restores itself.
    4. Without a stop: read the mailbox until the result is there.
    A lock (flock on the target's /proc/PID/stat, which ends with this process) excludes a second daemon: two must not
    write code into the same cave at once.
"""

import contextlib
import errno
import fcntl
import gc
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kinetod.attach.attach_types import AttachCode, AttachError, Deadline, Stop
from kinetod.attach.inject import trampoline
from kinetod.attach.inject.arch import Machine, Point, this_machine
from kinetod.attach.inject.ptrace import LostError, StoppedThread, StuckError, in_own_thread, translate
from kinetod.attach.inject.thread_policy import (
    ThreadPolicy,
    read_facts,
    refuse_unsuitable,
    takes_eintr,
    thread_state,
    why_none,
)
from kinetod.attach.inject.trampoline import Frame, Placed, Work
from kinetod.attach.inspect import standstill
from kinetod.attach.inspect.target_image import Mapping, TargetImage
from kinetod.attach.inspect.target_memory import gone

# Regions lie side by side from here on, between heap and libraries: they share page tables and are out of the way.
_ANCHOR = 0x6B69_6E65_0000
_RETRY_S = 0.0003
_FAST_RETRY_S, _FAST_RETRIES = 0.00001, 200  # most threads reach a good point soon
_RETRY_STEPS = 7  # pauses of different lengths, so as not to fall in step with a loop of the target
_POLL_S = 30e-6
_SLOW_POLL_S = 0.001
_SLOW_AFTER_S = 0.02
_TRIES_BETWEEN_LOOKS = 16
_LOOK_EVERY_S = 0.05  # at whether the target has been stopped or frozen
_LOCK_RETRY_S = 0.005
_MAX_MAP_FAILURES = 8


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One call for the target to make."""

    function: int
    arguments: tuple[int, ...]
    payload: bytes = b""
    check: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a method makes its call: the region's address is chosen first, then `request` builds the call."""

    policy: ThreadPolicy
    request: Callable[[int, tuple[int, ...]], CallRequest]  # from the region's address and those of `codes`
    codes: tuple[bytes, ...] = ()  # constant code besides the trampoline
    needed: int = 1  # how many of these must fit; the others are placed if there is room


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result reported by the trampoline."""

    stop: Stop
    initialised: bool  # the check passed and the function was called
    result: int  # return value of the function: 64 bits, unsigned


class BadPointError(Exception):
    """The thread stopped at a point from which it must not be redirected."""


def hand_over(image: TargetImage, plan: Plan, deadline: Deadline) -> CallOutcome:
    """Makes the call. Raises AttachError, with TIMEOUT if no thread reached a good point or the chosen one does not
    run.
    """
    with _exclusive(image, deadline):
        while True:
            try:
                return in_own_thread(lambda: _HandOver(image, plan, deadline).run())
            except StuckError as error:
                standstill.check(image.pid)
                if deadline.passed:
                    raise AttachError(
                        AttachCode.TIMEOUT,
                        f"process {image.pid} could not be stopped ({error}): is the machine overloaded? Try again",
                    ) from None


class _HandOver:
    """One call. Runs in a thread of its own, see ptrace.py."""

    def __init__(self, image: TargetImage, plan: Plan, deadline: Deadline) -> None:
        self._image, self._plan, self._deadline = image, plan, deadline
        self._machine: Machine = this_machine()
        facts = read_facts(image)
        refuse_unsuitable(image, facts)
        self._see_signals = not facts.filtered  # a filter may kill the process for rt_sigpending
        self._attempts = 0
        self._longest_stop_ns = 0
        self._last = ""

    def run(self) -> CallOutcome:
        for _failure in range(_MAX_MAP_FAILURES):
            placed = self._place()
            work = self._work(placed)
            tid, frame = self._redirect_any(work, placed)
            outcome = self._await_result(tid, work, frame)
            if outcome is not None:
                return outcome
            self._image.refresh()  # the address has been taken since
        raise AttachError(AttachCode.FAILED, f"process {self._image.pid} has no free address for a page; try again")

    def _place(self) -> tuple[Placed, ...]:
        """Places of the codes, the trampoline first. It is written during the stop."""
        placed: list[Placed] = []
        for code in (trampoline.TRAMPOLINE[self._machine.name], *self._plan.codes):
            try:
                placed.append(trampoline.find_place(self._image, code, placed))
            except AttachError:
                if len(placed) <= self._plan.needed:
                    raise
                break
        return tuple(placed)

    def _work(self, placed: tuple[Placed, ...]) -> Work:
        region = free_address(self._image.maps, trampoline.region_bytes(self._machine))
        request = self._plan.request(region, tuple(place.address for place in placed[1:]))
        if len(request.payload) > trampoline.MAX_PAYLOAD_BYTES:
            raise AttachError(AttachCode.FAILED, f"{len(request.payload)} bytes do not fit into one page")
        return Work(
            region=region,
            nonce=secrets.randbits(63) | 1,
            function=request.function,
            arguments=request.arguments,
            payload=request.payload,
            check=request.check,
            see_signals=self._see_signals,
        )

    def _redirect_any(self, work: Work, placed: tuple[Placed, ...]) -> tuple[int, Frame]:
        while True:
            if self._attempts % _TRIES_BETWEEN_LOOKS == 0:
                standstill.check(self._image.pid)  # a frozen thread could be redirected, but would not run
            for tid in self._plan.policy.candidates():
                frame = self._try(tid, work, placed)
                if frame is not None:
                    return tid, frame
                if self._deadline.passed:
                    break
            if self._deadline.passed:
                raise AttachError(
                    AttachCode.TIMEOUT,
                    f"process {self._image.pid} never reached a point where code could be injected"
                    f" (tries: {self._attempts}): {self._last or why_none(self._image)}; try again",
                )
            pause_s = _FAST_RETRY_S if self._attempts < _FAST_RETRIES else _RETRY_S
            time.sleep(pause_s * (1 + self._attempts % _RETRY_STEPS))

    def _try(self, tid: int, work: Work, placed: tuple[Placed, ...]) -> Frame | None:
        self._attempts += 1
        thread = StoppedThread(self._image.pid, tid, takes_eintr=takes_eintr(self._image, tid))
        collecting = gc.isenabled()
        gc.disable()  # not while the target is stopped
        try:
            # Before the stop, too: it warms what the check needs during the stop, which then takes half as long.
            thread.check(self._image.approved)
            with thread:
                return self._redirect(thread, work, placed)
        except StuckError:
            raise
        except (LostError, BadPointError) as error:
            self._last = str(error)
        except OSError as error:
            self._last = str(error)
            if error.errno != errno.ESRCH:
                raise translate(self._image.pid, error) from None
        finally:
            if collecting:
                gc.enable()
            self._longest_stop_ns = max(self._longest_stop_ns, thread.stopped_ns)
        if thread_state(self._image, self._image.pid) == "X":
            raise gone(self._image.pid)
        return None

    def _redirect(self, thread: StoppedThread, work: Work, placed: tuple[Placed, ...]) -> Frame:
        memory = self._image.memory
        point = self._machine.point(thread, memory)
        if point is None or not self._plan.policy.accepts(thread.tid, point):
            where = f"pc {point.pc:#x}" if point is not None else "in a call that must not be interrupted"
            raise BadPointError(f"thread {thread.tid}: {where}")
        old_mask = thread.signal_mask()
        resumption = self._machine.resumption(point)
        frame = trampoline.build_frame(self._machine, thread, point, resumption, work, old_mask)
        self._check_stack(point, frame)
        thread.check(self._image.approved)
        for place in placed:
            if memory.read(place.address, len(place.code)) != place.code:
                self._write_code(thread, place)
        if memory.writes:
            memory.write(frame.parameters, frame.data)
        else:
            thread.write(frame.parameters, frame.data)
        self._machine.redirect(thread, point, placed[0].address, frame.parameters, frame.saved)
        with contextlib.suppress(OSError):  # killed at this moment
            # afterwards: if we died in between, they would stay blocked
            thread.set_signal_mask(trampoline.BLOCKED_SIGNALS | old_mask)
        return frame

    def _write_code(self, thread: StoppedThread, place: Placed) -> None:
        if self._image.memory.writes:
            with contextlib.suppress(OSError):  # a kernel may forbid it (proc_mem.force_override)
                self._image.memory.write(place.address, place.code)
                return
        thread.poke(place.address, place.code + bytes(-len(place.code) % 8))

    def _check_stack(self, point: Point, frame: Frame) -> None:
        mapping = self._image.mapping_at(point.sp - 1)
        if mapping is not None and "w" in mapping.permissions:
            grows = mapping.path == "[stack]"  # the kernel enlarges it as the thread touches it
            if (frame.parameters if grows else frame.lowest) >= mapping.start:
                return
        self._image.refresh()
        raise BadPointError(f"not enough stack at {point.sp:#x}")

    def _await_result(self, tid: int, work: Work, frame: Frame) -> CallOutcome | None:
        """Returns the trampoline's result; None if the region could not be mapped there, so that another address may
        work.
        """
        began = time.monotonic()
        look_at = began + _LOOK_EVERY_S
        while True:
            found = trampoline.read_result(self._image, work)
            if found is not None:
                stop = Stop(tid, self._longest_stop_ns, self._attempts)
                return CallOutcome(stop, initialised=found[0] == trampoline.DONE, result=found[1])
            error = trampoline.read_error(self._image, work, frame)
            if error == errno.EEXIST:
                return None
            if error:
                raise AttachError(
                    AttachCode.LIMIT,
                    f"process {self._image.pid} cannot map a page: {os.strerror(error)}; raise its limit on address "
                    "space ('ulimit -v') or the host's vm.max_map_count",
                )
            if thread_state(self._image, self._image.pid) == "X":
                raise gone(self._image.pid)
            if time.monotonic() >= look_at:
                standstill.check(self._image.pid)
                look_at = time.monotonic() + _LOOK_EVERY_S
            if self._deadline.passed:
                raise AttachError(
                    AttachCode.TIMEOUT,
                    f"thread {tid} of process {self._image.pid} received the code but did not run it in time: is the"
                    " machine overloaded? Try again",
                )
            time.sleep(_POLL_S if time.monotonic() - began < _SLOW_AFTER_S else _SLOW_POLL_S)


def free_address(maps: list[Mapping], size: int) -> int:
    """Returns the page-aligned address of a hole of `size` bytes. Raises AttachError when there is none."""
    highest = max((mapping.start for mapping in maps if mapping.path != "[vsyscall]"), default=0)
    address = _ANCHOR if highest > _ANCHOR else _middle_of_largest_hole(maps)
    for mapping in maps:
        if mapping.end <= address:
            continue
        if mapping.start >= address + size:
            return address
        address = mapping.end
    raise AttachError(AttachCode.FAILED, "the address space of the process is full")


def _middle_of_largest_hole(maps: list[Mapping]) -> int:
    holes = [(after.start - before.end, before.end) for before, after in zip(maps, maps[1:], strict=False)]
    size, start = max(holes, default=(0, trampoline.PAGE << 8))
    return start + size // 2 & -trampoline.PAGE


@contextlib.contextmanager
def _exclusive(image: TargetImage, deadline: Deadline) -> Iterator[None]:
    try:
        lock = os.open(image.proc / "stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise gone(image.pid) from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed:
                    raise AttachError(
                        AttachCode.TIMEOUT, f"another attach to process {image.pid} is in progress; try again"
                    ) from None
                time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(lock)
