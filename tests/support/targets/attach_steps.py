"""The steps of an attach: each place where the daemon's side of it calls the kernel. A step can be made to fail, or to
be the last one.
"""

import builtins
import ctypes
import errno
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from kinetod.attach.attach_types import AttachError, AttachRequest, Deadline
from kinetod.attach.inspect.target_memory import TargetMemory
from kinetod.attach_helper.attempt import attach
from kinetod.base.libc import LIBC
from kinetod.processes import credentials
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns

from support.waiting import scaled

# All through which an attach reaches the process, the kernel or the agent.
_CALLS = (
    *((LIBC, name) for name in ("ptrace", "process_vm_readv", "process_vm_writev", "syscall")),
    *((os, name) for name in ("waitpid", "open", "pread", "pwrite", "read", "listdir", "readlink", "pidfd_open")),
    *((fcntl, "flock"), (socket, "send_fds"), (socket.socket, "recv"), (threading.Thread, "start")),
    (builtins, "open"),
)
_REQUESTS = {0x4204: "GETREGSET", 0x4205: "SETREGSET", 0x4206: "SEIZE", 0x4207: "INTERRUPT", 0x420A: "GETSIGMASK"}
_REQUESTS |= {0x420B: "SETSIGMASK", 5: "POKEDATA", 17: "DETACH"}
_OURS = ("kinetod.", "kineto_protos.")
_DEPTH = 3  # functions of ours that name a step
Act = Callable[[str, Callable[[], Any]], Any]  # of the step's name and the call itself


def attached(pid: int, act: Act | None = None, limit_s: float = 20.0) -> socket.socket:
    """The channel of one attach, made in this process as the attach helper makes it. Raises AttachError.

    act: has it make each of the calls.
    """
    key = ProcessKey(pid, start_time_ns(pid, PROC))
    request = AttachRequest(
        key=key, approved=credentials.read(pid), deadline=Deadline(scaled(limit_s)), token=time.time_ns()
    )
    try:
        with _acting(act) if act is not None else nullcontext():
            return attach(request)[1]
    except AttachError as error:
        raise request.explained(error) from None


@contextmanager
def _acting(act: Act) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name in _CALLS]

    def placed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            if not frame.f_globals.get("__name__", "").startswith(_OURS):
                return original(*arguments, **named)
            what = f"{name} {_REQUESTS.get(arguments[0], arguments[0])}" if name == "ptrace" else name
            return act(f"{what} < {' < '.join(_callers(frame))}", lambda: original(*arguments, **named))

        return call

    for owner, name, original in originals:
        setattr(owner, name, placed(name, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _callers(frame: FrameType | None) -> Iterator[str]:
    depth = 0
    while frame is not None and depth < _DEPTH:
        if frame.f_globals.get("__name__", "").startswith(_OURS):
            yield frame.f_code.co_qualname
            depth += 1
        frame = frame.f_back


def noting(steps: dict[str, None]) -> Act:
    """Notes the steps in their order."""

    def act(step: str, call: Callable[[], Any]) -> Any:
        steps.setdefault(step)
        return call()

    return act


def place(step: str) -> str:
    """The call and the function that makes it, whoever calls that."""
    return " < ".join(step.split(" < ")[:2])


def failing(wanted: str, redirects: list[str], *, always: bool) -> Act:
    """Lets the step fail the first time, without having done anything, or that call of that function each time. Adds
    the redirections of a thread to `redirects`.
    """
    left = [wanted]

    def act(step: str, call: Callable[[], Any]) -> Any:
        if not (place(step) == place(wanted) if always else step in left):
            redirects.extend([step] * step.startswith("ptrace SETREGSET"))
            return call()
        left.clear()
        if step.startswith(("ptrace", "process_vm", "syscall")):
            ctypes.set_errno(errno.EIO)
            return -1
        if step.startswith("start"):
            raise RuntimeError("can't start new thread")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return act


def dying_after(wanted: str) -> Act:
    """Has the process killed once the step is done."""

    def act(step: str, call: Callable[[], Any]) -> Any:
        result = call()
        if step == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return act


# Modes in which the memory file of a process cannot be opened, by what is left.
DENIED = {
    "memory file": (),
    "no memory file": (os.O_RDWR, os.O_RDONLY),
}


def denied(access: str) -> Callable[[TargetMemory, int], int]:
    """What stands for TargetMemory._opened where the file's mode is in the way."""
    opened, modes = TargetMemory._opened, DENIED[access]
    return lambda memory, mode: -1 if mode in modes else opened(memory, mode)
