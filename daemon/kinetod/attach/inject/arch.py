"""Everything that depends on the processor: registers, system calls, sending a stopped thread to the trampoline and
back.

Theory of operation
    A thread that stood in a blocking system call has been interrupted by our stop. Linux restarts such a call when the
    thread continues; a thread that we send elsewhere must do that itself, exactly as the kernel would:
    x86-64  rip is behind the syscall instruction, rax says what to do: -512, -513, -514 start the call again with the
            number in orig_rax; -516 continues by restart_syscall, which knows the remaining time (ptrace.py makes -514
            of the EINTR of some calls)
    aarch64 the kernel has put pc back to the svc instruction and x0 to the first argument before we see it. It
            has also forgotten whether restart_syscall would be right, so only calls whose time is absolute, or is
            written back by the kernel (ppoll, pselect), are used
"""

import errno
import platform
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inject.ptrace import NT_PRSTATUS, StoppedThread
from kinetod.attach.inspect.target_memory import TargetMemory

NT_PRFPREG, NT_ARM_SYSTEM_CALL, NT_ARM_SVE = 2, 0x404, 0x405
RED_ZONE = 128
_U32, _U64 = 2**32 - 1, 2**64
_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_FUTEX_COMMAND = 0x7F  # without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME
_TIMER_ABSTIME = 1


@dataclass(frozen=True, slots=True)
class InterruptedCall:
    """A system call that a thread is inside."""

    number: int
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """State of a stopped thread."""

    pc: int
    sp: int
    call: InterruptedCall | None  # the restartable call that it is blocked in, or entered on the way to the stop
    registers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resumption:
    """Registers with which the thread continues as if it had never been stopped."""

    registers: tuple[int, ...]
    pc_interrupted: int  # where to continue with -EINTR if a signal arrived in between; 0: it was in no call


class Machine(ABC):
    """One processor architecture."""

    name: str
    parked_calls: dict[int, str]  # number -> name: the kernel restarts them transparently
    waiting_calls: dict[int, str]  # used too, if they have no time limit, when no thread is in a parked call
    futex: int
    restart: int  # restart_syscall: the rest of a wait that a stop or a signal has interrupted, with its arguments
    # system calls that the trampoline makes in the target, for the check of seccomp filters
    injected_calls: dict[str, int]
    register_bytes: int

    def point(self, thread: StoppedThread, memory: TargetMemory) -> Point | None:
        """Returns the thread's state; None if it cannot be used there at all."""
        data = thread.registers(NT_PRSTATUS, self.register_bytes)
        if len(data) != self.register_bytes:  # it runs 32-bit code
            return None
        return self._point(thread, struct.unpack(f"<{len(data) // 8}Q", data), memory)

    @abstractmethod
    def _point(self, thread: StoppedThread, registers: tuple[int, ...], memory: TargetMemory) -> Point | None: ...

    @abstractmethod
    def resumption(self, point: Point) -> Resumption:
        """Returns how the thread resumes from there."""

    @abstractmethod
    def redirect(self, thread: StoppedThread, point: Point, pc: int, parameters: int, saved: int) -> None:
        """Makes the thread continue in the trampoline, with its stack ending at the parameters; all or nothing."""

    def parked_call(self, number: int, arguments: tuple[int, ...]) -> InterruptedCall | None:
        """Returns the call if a thread that is blocked in it may be used."""
        name = self.parked_calls.get(number)
        if name is None:
            return None
        if name == "futex" and arguments[1] & _FUTEX_COMMAND not in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET):
            return None
        return InterruptedCall(number, arguments)

    def waiting_call(self, number: int, arguments: tuple[int, ...], *, begun: bool = False) -> InterruptedCall | None:
        """Returns the call if its arguments set no time limit (a socket may have its own), or if it has just begun."""
        name = self.waiting_calls.get(number)
        if name is None:
            return None
        if name.startswith("epoll") and arguments[3] & _U32 != _U32 and not begun:  # a timeout of -1
            return None
        if name == "rt_sigtimedwait" and arguments[2] and not begun:
            return None
        if name == "epoll_pwait" and arguments[4]:
            return None
        return InterruptedCall(number, arguments)

    def holds_no_low_level_lock(self, call: InterruptedCall) -> bool:
        """Whether a thread blocked in this call cannot be inside an allocator or the dynamic loader.

        Their locks wait by FUTEX_WAIT; semaphores, condition variables and joins by FUTEX_WAIT_BITSET.
        """
        return call.number != self.futex or call.arguments[1] & _FUTEX_COMMAND == _FUTEX_WAIT_BITSET


_X86_STRUCT = (  # struct user_regs_struct
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base"
    " ds es fs gs"
)
_X86_NAMES = _X86_STRUCT.split()
_X86 = {name: index for index, name in enumerate(_X86_NAMES)}
# In the order in which the trampoline pops them from the stack.
_X86_POPPED = "r15 r14 r13 r12 r11 r10 r9 r8 rbp rbx rdx rcx rsi rdi rax eflags rip"


class X86_64(Machine):
    """x86-64."""

    name = "x86_64"
    parked_calls = {  # noqa: RUF012
        7: "poll",
        23: "select",
        35: "nanosleep",
        61: "wait4",
        202: "futex",
        219: "restart_syscall",  # an interrupted futex, nanosleep or poll
        230: "clock_nanosleep",
        247: "waitid",
        270: "pselect6",
        271: "ppoll",
    }
    waiting_calls = {  # noqa: RUF012
        0: "read",
        34: "pause",
        43: "accept",
        45: "recvfrom",
        47: "recvmsg",
        128: "rt_sigtimedwait",
        232: "epoll_wait",
        281: "epoll_pwait",
        288: "accept4",
    }
    futex, restart = 202, 219
    injected_calls = {"mmap": 9, "munmap": 11, "rt_sigprocmask": 14}  # noqa: RUF012
    register_bytes = 8 * len(_X86_NAMES)
    saved_registers = tuple(_X86[name] for name in _X86_POPPED.split())

    _USER_64 = 0x33  # cs
    _SYSCALL = b"\x0f\x05"
    _RESTART_SYSCALL = 219
    _ERESTART = (_U64 - 512, _U64 - 513, _U64 - 514)
    _ERESTART_RESTARTBLOCK = _U64 - 516
    _EINTR = _U64 - errno.EINTR
    _TRAP_AND_DIRECTION = 0x500  # eflags

    def _point(self, thread: StoppedThread, registers: tuple[int, ...], memory: TargetMemory) -> Point | None:
        if registers[_X86["cs"]] != self._USER_64:
            return None
        pc, number, result = registers[_X86["rip"]], registers[_X86["orig_rax"]], registers[_X86["rax"]]
        call = None
        if number < _U64 // 2:  # the thread is leaving a system call
            if result in (*self._ERESTART, self._ERESTART_RESTARTBLOCK):
                arguments = tuple(registers[_X86[name]] for name in ("rdi", "rsi", "rdx", "r10", "r8", "r9"))
                call = self.parked_call(number, arguments) or self.waiting_call(number, arguments, begun=True)
                if call is None or memory.read(pc - 2, 2) != self._SYSCALL:
                    return None
            elif result == self._EINTR and self.waiting_calls.get(number, "").startswith("epoll"):
                call = InterruptedCall(number, ())  # left alone by ptrace.py: the caller itself continues to wait
            elif result >= _U64 - 4095:
                return None  # it must see its error unchanged
        return Point(pc, registers[_X86["rsp"]], call, registers)

    def resumption(self, point: Point) -> Resumption:
        """See Machine."""
        registers = list(point.registers)
        if point.call is None or registers[_X86["rax"]] == self._EINTR:
            return Resumption(tuple(registers), 0)
        again = registers[_X86["rax"]] != self._ERESTART_RESTARTBLOCK
        registers[_X86["rax"]] = registers[_X86["orig_rax"]] if again else self._RESTART_SYSCALL
        registers[_X86["rip"]] -= len(self._SYSCALL)
        return Resumption(tuple(registers), point.pc)

    def redirect(self, thread: StoppedThread, point: Point, pc: int, parameters: int, saved: int) -> None:
        """See Machine."""
        registers = list(point.registers)
        registers[_X86["rip"]] = pc
        registers[_X86["rsp"]] = registers[_X86["rbx"]] = parameters
        registers[_X86["rbp"]] = saved
        registers[_X86["rax"]] = 0
        registers[_X86["orig_rax"]] = _U64 - 1  # makes the kernel restart nothing
        registers[_X86["eflags"]] &= ~self._TRAP_AND_DIRECTION
        thread.set_registers(NT_PRSTATUS, struct.pack(f"<{len(registers)}Q", *registers))


class Aarch64(Machine):
    """aarch64."""

    name = "aarch64"
    parked_calls = {  # noqa: RUF012
        72: "pselect6",
        73: "ppoll",
        95: "waitid",
        98: "futex",
        115: "clock_nanosleep",
        260: "wait4",
    }
    waiting_calls = {63: "read", 202: "accept", 207: "recvfrom", 212: "recvmsg", 242: "accept4"}  # noqa: RUF012
    futex, restart = 98, 128
    injected_calls = {"mmap": 222, "munmap": 215, "rt_sigprocmask": 135, "rt_sigreturn": 139}  # noqa: RUF012
    register_bytes = 8 * 34  # x0 - x30, sp, pc, pstate
    SP, PC, PSTATE = 31, 32, 33

    _SVC = b"\x01\x00\x00\xd4"
    _BRANCH_TYPE_AND_STEP = 0xC00 | 1 << 21  # pstate
    _SVE_LIVE = 1  # SVE_PT_REGS_SVE

    def _point(self, thread: StoppedThread, registers: tuple[int, ...], memory: TargetMemory) -> Point | None:
        pc = registers[self.PC]
        call = None
        if memory.read(pc, 4) == self._SVC:
            arguments = registers[:6]
            call = self.parked_call(registers[8], arguments) or self.waiting_call(registers[8], arguments)
            if call is None:
                return None
        elif self._has_live_sve(thread):  # would be lost at the trampoline's first system call
            return None
        return Point(pc, registers[self.SP], call, registers)

    def parked_call(self, number: int, arguments: tuple[int, ...]) -> InterruptedCall | None:
        """See Machine."""
        call = super().parked_call(number, arguments)
        name = self.parked_calls.get(number)
        if name == "clock_nanosleep" and not arguments[1] & _TIMER_ABSTIME:
            return None
        if name == "futex" and arguments[1] & _FUTEX_COMMAND == _FUTEX_WAIT and arguments[3]:
            return None
        return call

    def resumption(self, point: Point) -> Resumption:
        """See Machine."""
        return Resumption(point.registers, point.pc + len(self._SVC) if point.call is not None else 0)

    def redirect(self, thread: StoppedThread, point: Point, pc: int, parameters: int, saved: int) -> None:
        """See Machine."""
        registers = list(point.registers)
        registers[self.PC] = pc
        registers[self.SP] = registers[19] = parameters
        registers[20] = saved
        registers[29] = registers[30] = 0
        registers[self.PSTATE] &= ~self._BRANCH_TYPE_AND_STEP
        thread.set_registers(NT_PRSTATUS, struct.pack(f"<{len(registers)}Q", *registers))

    def _has_live_sve(self, thread: StoppedThread) -> bool:
        try:
            header = thread.registers(NT_ARM_SVE, 16)
        except OSError:  # a processor without SVE
            return False
        return bool(struct.unpack_from("<H", header, 12)[0] & self._SVE_LIVE)


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """This host's architecture. Raises AttachError if it is not supported."""
    machines: dict[str, type[Machine]] = {"x86_64": X86_64, "aarch64": Aarch64}
    name = platform.machine()
    if name not in machines:
        raise AttachError(AttachCode.UNSUPPORTED, f"live attach supports x86-64 and aarch64, not {name}")
    if name == "x86_64" and " xsave " not in Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0] + " ":
        raise AttachError(
            AttachCode.UNSUPPORTED, "live attach needs XSAVE, which this processor or kernel does not support"
        )
    return machines[name]()
