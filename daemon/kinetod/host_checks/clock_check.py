"""Checks this host's clock, which aligns traces of several hosts."""

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kinetod.attach.attach_types import Finding, Status
from kinetod.base.libc import LIBC
from kinetod.host_checks.check_protocol import CheckQuestion

TIMEDATECTL = ("timedatectl", "show", "--property=NTPSynchronized", "--value")
DEADLINE_S = 3.0
_STA_UNSYNC, _STA_NANO, _TIME_ERROR = 0x40, 0x2000, 5  # linux/timex.h
_MUCH_US = 100_000  # of possible error; chrony and ntpd stay far below it
_ADVICE = "start chrony or systemd-timesyncd; chrony tells the kernel with `rtcsync` in its configuration"


class _Timex(ctypes.Structure):
    """struct timex of a 64-bit Linux, all zero: the call only reads."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 160),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The kernel's view of its clock, in microseconds."""

    synchronised: bool
    offset_us: float  # still to be corrected
    estimated_error_us: int
    possible_error_us: int


def read() -> Kernel:
    """Asks the kernel. Raises OSError, for example in a service whose unit has ProtectClock=."""
    clock = _Timex()
    state = LIBC.adjtimex(ctypes.byref(clock))
    if state < 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number))
    return Kernel(
        synchronised=state != _TIME_ERROR and not clock.status & _STA_UNSYNC,
        offset_us=clock.offset / (1000 if clock.status & _STA_NANO else 1),
        estimated_error_us=clock.esterror,
        possible_error_us=clock.maxerror,
    )


def check(_question: CheckQuestion) -> Iterable[Finding]:
    """Asks the kernel, or systemd if the kernel refuses."""
    try:
        kernel = read()
    except OSError as exc:
        return [by_systemd(str(exc.strerror))]
    return findings(kernel)


def findings(kernel: Kernel) -> Iterator[Finding]:
    """The finding about the clock."""
    name = "clock"
    if not kernel.synchronised:
        detail = "not synchronised, as far as the kernel knows: traces of several hosts will not line up"
        yield Finding(name, Status.NOTE, detail, _ADVICE)
        return
    detail = (
        f"synchronised; {kernel.offset_us:.0f} \N{MICRO SIGN}s still to be corrected, estimated error "
        f"{kernel.estimated_error_us} \N{MICRO SIGN}s, possible error {kernel.possible_error_us / 1000:.1f} ms"
    )
    if kernel.possible_error_us > _MUCH_US:
        yield Finding(name, Status.NOTE, f"{detail}, which is a lot", "check that the time servers answer")
    else:
        yield Finding(name, Status.OK, detail)


def by_systemd(why: str, command: Sequence[str] = TIMEDATECTL) -> Finding:
    """Asks systemd, which has no figures. why: why the kernel could not be asked. Blocking."""
    name = "clock"
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return Finding(
            name, Status.UNKNOWN, f"the daemon may not ask the kernel ({why}), and {command[0]} gave no answer"
        )
    said = done.stdout.decode("ascii", "replace").strip()
    if said == "yes":
        return Finding(name, Status.OK, f"synchronised, says {command[0]}; the daemon may not ask how well ({why})")
    if said == "no":
        return Finding(name, Status.NOTE, "not synchronised: traces of several hosts will not line up", _ADVICE)
    return Finding(name, Status.UNKNOWN, f"the daemon may not ask the kernel ({why}), and {command[0]} gave no answer")
