"""Reads the seccomp filters of a process, which takes one short stop of one of its threads.

Theory of operation
    The kernel shows a thread's filters only to its tracer, only with CAP_SYS_ADMIN, and only to one that has no
    filter itself. So a thread is stopped (ptrace.py), asked, and let go. When we die at any point the kernel lets it
    go.

    A stop makes the kernel go on with sleeps and polls through restart_syscall, which filters see too. A filter
    that kills a process for that would kill it for any stop (also for SIGSTOP and SIGCONT). Threads that run, or wait
    where the kernel just repeats the call, are taken first; on others that one register (the pending result) is
    changed so that the call starts anew, when the filter turns out to be of that kind.
"""

import contextlib
import errno
import struct
from pathlib import Path

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inject.ptrace import LostError, StoppedThread, in_own_thread
from kinetod.attach.inspect.process_inspection import PROC, SECCOMP_FILTER, X86_64, Seccomp, thread_seccomp
from kinetod.attach.policy.seccomp_check import ActionKind, Filter, SeccompError, evaluate
from kinetod.processes.credentials import Credentials

_NT_PRSTATUS = 1
_MAX_FILTERS = 64
_TRIES = 5  # a signal may come first, or the thread may end
# x86-64: calls that go on through restart_syscall, and where their state lies in struct user_regs_struct
_RESTART_SYSCALL = 219
_CONTINUED_CALLS = {35, 230, 7}  # nanosleep, clock_nanosleep, poll
_FUTEX, _FUTEX_TIMEOUT = 202, 4  # a futex with a timeout too; its place in /proc/PID/task/TID/syscall
_REGISTERS, _RAX, _ORIG_RAX = struct.Struct("<27Q"), 10, 15
_RESTARTNOINTR, _RESTART_RESTARTBLOCK = 2**64 - 513, 2**64 - 516


def read_filters(
    pid: int, seccomp: Seccomp, machine: str = X86_64, *, approved: Credentials | None = None
) -> list[Filter]:
    """The filters of the process, oldest first; `seccomp` is what its main thread has.

    approved: what the process must be; None: anything. Raises AttachError: REPLACED if it is not; SECCOMP where they
    may not be read, TRACED or NOT_PERMITTED where the process may not be stopped, UNSUITABLE, GONE, TIMEOUT.
    """
    if seccomp.mode != SECCOMP_FILTER:
        return []
    try:
        return [Filter(program) for program in _read(pid, seccomp, machine, approved)]
    except SeccompError as exc:
        raise AttachError(AttachCode.SECCOMP, f"a seccomp filter of process {pid} cannot be evaluated: {exc}") from exc


def _read(pid: int, seccomp: Seccomp, machine: str, approved: Credentials | None) -> list[bytes]:
    def work() -> list[bytes]:
        with StoppedThread(pid, _thread(pid, seccomp)) as thread:
            programs = _programs(thread)
            if machine == X86_64:
                _keep_alive(thread, programs, machine)  # whatever it is: this undoes what our stop has done
            if approved is not None:
                thread.check(approved)
            return programs

    why = ""
    for _ in range(_TRIES):
        if not (PROC / str(pid)).exists():
            raise AttachError(AttachCode.GONE, f"process {pid} has ended")
        try:
            return in_own_thread(work)  # a new one each time: a thread that did not stop is let go by its end
        except LostError as exc:
            why = str(exc)
    raise AttachError(
        AttachCode.TIMEOUT, f"process {pid} has a seccomp filter that could not be read: {why}; try again"
    )


def _thread(pid: int, seccomp: Seccomp) -> int:
    """A thread with the main thread's filters, one that a stop does not send through restart_syscall if there is."""
    tids = []
    with contextlib.suppress(OSError):
        tids = sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    for tid in sorted(tids, key=lambda tid: tid == pid):  # the main thread last: others have less to lose
        if thread_seccomp(pid, tid) == seccomp and _repeats(pid, tid):
            return tid
    return pid


def _repeats(pid: int, tid: int, proc: Path = PROC) -> bool:
    try:
        fields = (proc / str(pid) / "task" / str(tid) / "syscall").read_text().split()
        if fields[0] == "running":
            return True
        number = int(fields[0])
        if number == _FUTEX:
            return int(fields[_FUTEX_TIMEOUT], 16) == 0
        return number not in _CONTINUED_CALLS
    except (OSError, ValueError, IndexError):
        return False


def _programs(thread: StoppedThread) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < _MAX_FILTERS:
        try:
            found.append(thread.seccomp_filter(len(found)))
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return found
            if exc.errno == errno.ESRCH:
                raise LostError(f"thread {thread.tid} ended") from exc
            raise AttachError(
                AttachCode.SECCOMP,
                f"process {thread.pid} has a seccomp filter that the kernel does not show ({exc.strerror}); one that "
                "kills would end the process, so it is left alone. Run kinetod with CAP_SYS_ADMIN and without a "
                "seccomp filter of its own (a privileged container), or start the process with the agent",
            ) from exc
    raise AttachError(AttachCode.SECCOMP, f"process {thread.pid} has more than {_MAX_FILTERS} seccomp filters")


def _keep_alive(thread: StoppedThread, programs: list[bytes], machine: str) -> None:
    """Makes the interrupted call start anew where going on with it would end the process (see above)."""
    data = thread.registers(_NT_PRSTATUS, _REGISTERS.size)
    if len(data) != _REGISTERS.size:
        return  # runs 32-bit code
    registers = list(_REGISTERS.unpack(data))
    if registers[_ORIG_RAX] >> 63 or registers[_RAX] != _RESTART_RESTARTBLOCK:
        return
    action = evaluate([Filter(program) for program in programs], _RESTART_SYSCALL, (), machine)
    if action.kind not in (ActionKind.ALLOW, ActionKind.LOG):
        registers[_RAX] = _RESTARTNOINTR
        thread.set_registers(_NT_PRSTATUS, _REGISTERS.pack(*registers))
