"""One attach, in the helper process: from inspecting the target to the channel over which the agent runs.

Theory of operation
    1. The process is inspected, and refused if it cannot be attached to (preconditions.py).
    2. Without Python, only the collector's own thread is injected (collector_thread.py).
    3. Otherwise the methods are tried in turn, repeatedly until each has found its point. Each hands over the same
       bootstrap and then waits a while for the channel to appear. A later one may overtake an earlier one, whose code
       then does nothing; once a thread of ours runs it or waits for the GIL, no other is tried. Code that has been
       handed over is waited for until the deadline, even if the other methods cannot be used.
    4. The agent goes over the channel (payload.py).

    The main thread runs a pending call between two bytecodes. If it runs Python, that takes milliseconds, so PATIENCE_S
    is long. If it sleeps in the kernel, it may take days: once it has not been on a CPU for PARKED_S, the next method
    is tried. Up to 3.12 the main thread does not see a call queued by another thread until it takes the GIL again:
    after BYSTANDER_PATIENCE_S a thread of ours requests the GIL, which makes it do so.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kinetod.attach.attach_types import AttachCode, Attached, AttachError, AttachRequest, Bootstrap, Deadline, Stop
from kinetod.attach.channel import bootstrap as bootstraps
from kinetod.attach.channel import payload
from kinetod.attach.channel.private_channel import await_channel, let_go
from kinetod.attach.inspect import standstill
from kinetod.attach.inspect.target_image import PROC, TargetImage
from kinetod.attach.methods import collector_thread
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach.methods.pending_call import PendingCall
from kinetod.attach.methods.python_entry import would_be_warned
from kinetod.attach.policy import preconditions
from kinetod.attach.policy.preconditions import suitable_image
from kinetod.processes.identity import lines

log = logging.getLogger(__name__)
FIRST_TURN_S = 0.25
PATIENCE_S = 0.25
BYSTANDER_PATIENCE_S = 0.02
PARKED_S = 0.01
LET_GO_S = 0.5  # to withdraw from a process that is refused after all: its channel appears within milliseconds
# A thread of ours that has not run yet has the program's name. The agent, which comes next, would take it for the
# program's, so that forks warn about it.
NAMED_S, NAMELESS_LOOK_S = 2.0, 0.001
LOOK_EVERY_S = 0.25  # at whether the process has been stopped or frozen
_D_STATE_PATIENCE_SHARE = 0.5  # of the time; the other half is for entering
# Codes after which no other method is tried: the process is gone or stopped, or the kernel refuses.
_FINAL = frozenset(
    {AttachCode.GONE, AttachCode.NOT_PERMITTED, AttachCode.UNSUITABLE, AttachCode.LIMIT, AttachCode.REPLACED}
)


class Method(Protocol):
    """One way to make a Python process run the bootstrap. Blocking; used in the helper process only."""

    name: str

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """Hands the bootstrap over. Raises AttachError; the target then does not have the code."""

    def begun(self) -> bool:
        """Whether a thread of ours runs it, or waits there for the GIL."""

    def nameless(self) -> bool:
        """Whether a thread of ours has been started, but has not run yet."""

    def problem(self) -> AttachError | None:
        """Why the injected code does not run and never will; None if it runs, has run or may still run."""

    def finish(self) -> None:
        """Withdraws code that has not run yet. Idempotent, never raises, waits at most 50 ms."""


def warm_up() -> None:
    """Packs the agent and the collector, ahead of the first request."""
    payload.agent()
    with contextlib.suppress(AttachError):  # a daemon without the collector can still attach to Python
        collector_thread.library()


def attach(request: AttachRequest) -> tuple[Attached, socket.socket]:
    """Returns the channel to the running agent (or collector). Raises AttachError."""
    pid = request.key.pid
    # Every stop compares with the credentials of this moment: so the image, whose memory is opened below, is this
    # program's.
    approved = request.check_process()
    try:
        image = suitable_image(pid, request.deadline.left_s * _D_STATE_PATIENCE_SHARE, approved)
        python = image.python
        kind = f"Python {'.'.join(map(str, python.version))}" if python is not None else "no Python"
        log.debug("process %d: inspected: %s, %s", pid, kind, python.path if python is not None else image.exe)
        with contextlib.closing(image.memory):  # an error that passed through several frames may keep it for long
            return _entered(request, image)
    except OSError as exc:
        raise AttachError(AttachCode.FAILED, f"process {pid} could not be inspected: {exc}; try again") from exc


def _entered(request: AttachRequest, image: TargetImage) -> tuple[Attached, socket.socket]:
    pid = image.pid
    preconditions.await_quiet(image, request.deadline)
    request.check_process()  # again: everything read above belongs to this process
    if image.python is None:
        with _withdrawn(pid, request.token):
            stop, channel = collector_thread.bring_in(image, request.token, request.deadline)
        return _attached(collector_thread.METHOD, stop.stopped_ns, request), channel
    with _python_methods() as methods:
        took = bring_in(image, methods, bootstraps.make(request.token, first_number(pid)), request.deadline)
    attached = _attached(took.method, took.stopped_ns, request)
    try:
        payload.send(took.channel, pid, request.deadline)
    except BaseException:
        let_go(took.channel)
        raise
    log.debug("process %d: the agent has been sent", pid)
    return attached, took.channel


def first_number(pid: int, proc: Path = PROC) -> int:
    """Returns where the bootstrap's descriptors begin: at the end of the present table, since the kernel takes
    milliseconds to enlarge it. For a process that has ended, a later step reports that.
    """
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
        return int(status.partition("FDSize:")[2].split(None, 1)[0]) - bootstraps.AT_THE_END
    except (OSError, IndexError):
        return bootstraps.FIRST_NUMBER


def _attached(method: str, stopped_ns: int, request: AttachRequest) -> Attached:
    latency_ns = time.monotonic_ns() - request.received_ns
    return Attached(method=method.replace("_", "-"), stopped_ns=stopped_ns, latency_ns=latency_ns)


@contextlib.contextmanager
def _python_methods() -> Iterator[list[Method]]:
    """The methods in the order in which they are tried; they are finished on leaving."""
    methods: list[Method] = [PendingCall(), NativeThread()]
    try:
        yield methods
    finally:
        for method in methods:
            method.finish()


@dataclass(frozen=True, slots=True)
class Taken:
    """A channel, and the method after which it appeared."""

    method: str
    stopped_ns: int
    channel: socket.socket


def bring_in(image: TargetImage, methods: Sequence[Method], bootstrap: Bootstrap, deadline: Deadline) -> Taken:
    """Tries the methods in turn until the channel appears. Raises AttachError: then nothing is left waiting there."""
    with _withdrawn(image.pid, bootstrap.token):
        taken = _take_turns(image, methods, bootstrap, deadline)
    named_by = Deadline(min(NAMED_S, deadline.left_s))
    while any(method.nameless() for method in methods) and not named_by.passed:
        time.sleep(NAMELESS_LOOK_S)
    return taken


@contextlib.contextmanager
def _withdrawn(pid: int, token: int) -> Iterator[None]:
    """Ends code that waits in the process, through its channel, if the attach is refused halfway."""
    try:
        yield
    except (AttachError, OSError):
        with contextlib.suppress(AttachError):
            if channel := await_channel(pid, token, Deadline(LET_GO_S)):
                let_go(channel)
        raise


def _take_turns(image: TargetImage, methods: Sequence[Method], bootstrap: Bootstrap, deadline: Deadline) -> Taken:
    waiting, handed = list(methods), list[Method]()
    handed_over, stopped_ns, turn_s, patience_s = "", 0, FIRST_TURN_S, PATIENCE_S
    warned = would_be_warned(image)  # by a fork before a native thread has the GIL; a pending call avoids that
    error: AttachError | None = None
    while waiting and not deadline.passed:
        for method in tuple(waiting):
            if warned and method is not waiting[0] and not handed:
                continue
            try:
                stop = _hand_over(method, image, bootstrap, Deadline(min(turn_s, deadline.left_s)))
            except AttachError as exc:
                if exc.code in _FINAL:
                    raise
                log.debug("process %d: %s: %s", image.pid, method.name, exc.reason)
                error = error if exc.code is AttachCode.TIMEOUT and error else exc
                if exc.code is not AttachCode.TIMEOUT:
                    waiting.remove(method)
            else:
                waiting.remove(method)
                handed.append(method)
                took = (stop.tid, stop.stopped_ns / 1e6, stop.attempts)
                log.debug("process %d: %s: thread %d was stopped for %.2f ms, try %d", image.pid, method.name, *took)
                handed_over, stopped_ns = method.name, max(stopped_ns, stop.stopped_ns)
                patience_s = PATIENCE_S if stop.tid in (0, image.pid) else BYSTANDER_PATIENCE_S
            if handed and (channel := _patiently(image, bootstrap, min(patience_s, deadline.left_s), handed)):
                log.debug("process %d: the injected code is running", image.pid)
                return Taken(handed_over, stopped_ns, channel)
            standstill.check(image.pid)
            if any(each.begun() for each in handed):  # a second thread would only wait, too
                waiting.clear()
                break
        turn_s *= 2
    while handed:
        problem, last = _problem(handed), deadline.passed
        left = Deadline(0 if problem else min(LOOK_EVERY_S, deadline.left_s))
        if channel := await_channel(image.pid, bootstrap.token, left, image.approved):
            return Taken(handed_over, stopped_ns, channel)  # possibly from code that arrived without our noticing
        if problem is not None:
            raise problem
        standstill.check(image.pid)
        if last:
            raise _timeout(image.pid, error)
    raise error or _timeout(image.pid, None)


def _problem(handed: Sequence[Method]) -> AttachError | None:
    """Why none of the injected code runs; None if some of it may."""
    problems = [(method.begun(), method.problem()) for method in handed]
    if not problems or any(problem is None for _begun, problem in problems):
        return None
    # One that has begun and ended may have found that another came first: then the other one knows why.
    return min(problems, key=lambda each: each[0])[1]


def _hand_over(method: Method, image: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
    """Injects by one method. Raises AttachError, also if the process ends or unmaps memory in between."""
    try:
        return method.hand_over(image, bootstrap, deadline)
    except OSError as exc:
        raise AttachError(
            AttachCode.FAILED, f"could not attach to process {image.pid} by {method.name}: {exc}; try again"
        ) from exc


def _patiently(
    image: TargetImage, bootstrap: Bootstrap, patience_s: float, handed: Sequence[Method]
) -> socket.socket | None:
    """Waits that long for the channel, less if the main thread is asleep or the channel will not appear."""
    pid, end = image.pid, Deadline(patience_s)
    while True:
        before = _asleep_since(pid)
        channel = await_channel(pid, bootstrap.token, Deadline(min(PARKED_S, end.left_s)), image.approved)
        if channel is not None or end.passed or _problem(handed) or (before and before == _asleep_since(pid)):
            return channel


def _asleep_since(pid: int, proc: Path = PROC) -> str:
    """A text that changes whenever the main thread runs; empty if it is running or runnable."""
    task = proc / str(pid) / "task" / str(pid)
    with contextlib.suppress(OSError, IndexError):
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        status = lines((task / "status").read_bytes())
        return " ".join(line for line in status if "ctxt_switches" in line) if state == "S" else ""
    return ""


def _timeout(pid: int, error: AttachError | None) -> AttachError:
    """Error for a passed deadline. error: why another method could not be used."""
    delay = standstill.delay(pid)
    why = f"Its new thread is waiting for {delay}." if delay else "Is the process in a long call that holds the GIL?"
    besides = f" (Another method failed too: {error.reason})" if error is not None else ""
    return AttachError(
        AttachCode.TIMEOUT,
        f"process {pid} did not run the injected code before the attach deadline (kinetod --attach-deadline); the code "
        f"does nothing if it runs later. {why} Try again"
        f"{besides}",
    )
