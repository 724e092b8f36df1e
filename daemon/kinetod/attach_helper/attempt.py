"""One attach, in the helper process: from the process to the channel over which the agent runs.

Theory of operation
    1. The process is inspected, and refused if it cannot be attached to (preconditions.py).
    2. Without Python, only the collector's own thread is injected (collector_thread.py).
    3. Else the methods take their turns, again and again until each has found its point. Each hands over the same
       bootstrap and then gets some time for the channel to appear; a later one may be faster than an earlier one, whose
       code then does nothing. Code that has been handed over is waited for until the deadline, even if the other
       methods cannot be used.
    4. The agent goes over the channel (payload.py).

    A pending call is run by the main thread between two bytecodes. One that runs Python does that within
    milliseconds, so PATIENCE_S is long. One that sleeps in the kernel may do it in days: after PARKED_S in which it
    has not been on a processor at all, the next method's turn comes. Up to 3.12 the main thread does not see a call
    that another thread has queued before it takes the GIL anew: after BYSTANDER_PATIENCE_S a thread of ours asks for
    the GIL, which makes it do so.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kinetod.attach.attach_types import AttachCode, Attached, AttachError, AttachRequest, Bootstrap, Deadline, Stop
from kinetod.attach.channel import bootstrap as bootstraps
from kinetod.attach.channel import payload
from kinetod.attach.channel.private_channel import await_channel
from kinetod.attach.inspect import standstill
from kinetod.attach.inspect.target_image import PROC, TargetImage
from kinetod.attach.methods import collector_thread
from kinetod.attach.methods.method import Method
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach.methods.pending_call import PendingCall
from kinetod.attach.policy.preconditions import suitable_image
from kinetod.processes.proc_folder import lines

FIRST_TURN_S = 0.25
PATIENCE_S = 0.25
BYSTANDER_PATIENCE_S = 0.02
PARKED_S = 0.01
LOOK_EVERY_S = 0.25  # whether the process has been stopped or frozen meanwhile
_D_STATE_PATIENCE_SHARE = 0.5  # of the time; the other half is for getting in
# Codes after which no other method is tried: the process is gone or stands still, or the kernel says no.
_FINAL = frozenset(
    {AttachCode.GONE, AttachCode.NOT_PERMITTED, AttachCode.UNSUITABLE, AttachCode.LIMIT, AttachCode.REPLACED}
)


def warm_up() -> None:
    """Packs what travels, ahead of the first request."""
    payload.agent()
    with contextlib.suppress(AttachError):  # a daemon without the collector can still attach to Python
        collector_thread.library()


def attach(request: AttachRequest) -> tuple[Attached, socket.socket]:
    """The channel, at whose other end the agent (or the collector) runs. Raises AttachError."""
    pid = request.key.pid
    # What it is now is compared in every stop: then the image, whose memory is opened below, is this program's too.
    approved = request.check_process()
    image = suitable_image(pid, request.deadline.left_s * _D_STATE_PATIENCE_SHARE, approved)
    request.check_process()  # again: what has been looked at since is this process
    if image.python is None:
        stop, channel = collector_thread.bring_in(image, request.token, request.deadline)
        return _attached(collector_thread.METHOD, stop.stopped_ns, request), channel
    with _python_methods() as methods:
        took = bring_in(image, methods, bootstraps.make(request.token, first_number(pid)), request.deadline)
    attached = _attached(took.method, took.stopped_ns, request)
    try:
        payload.send(took.channel, pid, request.deadline)
    except BaseException:
        took.channel.close()
        raise
    return attached, took.channel


def first_number(pid: int, proc: Path = PROC) -> int:
    """Where the bootstrap's descriptors begin: at the end of the table as it is, since the kernel takes milliseconds to
    make a larger one. A process that has ended has none; what comes next tells that.
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
    """Lets the methods take their turns until the channel is there. Raises AttachError."""
    waiting, handed = list(methods), list[Method]()
    handed_over, stopped_ns, turn_s, patience_s = "", 0, FIRST_TURN_S, PATIENCE_S
    error: AttachError | None = None
    while waiting and not deadline.passed:
        for method in tuple(waiting):
            try:
                stop = _hand_over(method, image, bootstrap, Deadline(min(turn_s, deadline.left_s)))
            except AttachError as exc:
                if exc.code in _FINAL:
                    raise
                error = error if exc.code is AttachCode.TIMEOUT and error else exc
                if exc.code is not AttachCode.TIMEOUT:
                    waiting.remove(method)
            else:
                waiting.remove(method)
                handed.append(method)
                handed_over, stopped_ns = method.name, max(stopped_ns, stop.stopped_ns)
                patience_s = PATIENCE_S if stop.tid in (0, image.pid) else BYSTANDER_PATIENCE_S
            if handed and (channel := _patiently(image, bootstrap, min(patience_s, deadline.left_s), handed)):
                return Taken(handed_over, stopped_ns, channel)
            standstill.check(image.pid)
        turn_s *= 2
    while handed and not (problem := _problem(handed)):
        last = deadline.passed
        left = Deadline(min(LOOK_EVERY_S, deadline.left_s))
        if channel := await_channel(image.pid, bootstrap.token, left, image.approved):
            return Taken(handed_over, stopped_ns, channel)
        standstill.check(image.pid)
        if last:
            raise _timeout(image.pid, error)
    problem = _problem(handed)
    if problem is not None:
        raise problem
    raise error or _timeout(image.pid, None)


def _problem(handed: Sequence[Method]) -> AttachError | None:
    """Why none of the injected code runs; None if some of it may."""
    problems = [method.problem() for method in handed]
    return problems[0] if problems and all(problems) else None


def _hand_over(method: Method, image: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
    """Injects by one method. Raises AttachError, also if the process ends or unmaps memory meanwhile."""
    try:
        return method.hand_over(image, bootstrap, deadline)
    except OSError as exc:
        raise AttachError(
            AttachCode.FAILED, f"process {image.pid} could not be entered by {method.name}: {exc}; try again"
        ) from exc


def _patiently(
    image: TargetImage, bootstrap: Bootstrap, patience_s: float, handed: Sequence[Method]
) -> socket.socket | None:
    """The channel if it appears within that time, less if the main thread is asleep or it will not appear."""
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
    """The error at the deadline. error: why another method could not be used."""
    delay = standstill.delay(pid)
    why = f"Its new thread waits for {delay}." if delay else "Is it in a long call that holds the GIL?"
    besides = f" (Another method failed too: {error.reason})" if error is not None else ""
    return AttachError(
        AttachCode.TIMEOUT,
        f"process {pid} did not run the injected code before the attach deadline (kinetod --attach-deadline); the code "
        f"is ignored if it runs later. {why} Try again"
        f"{besides}",
    )
