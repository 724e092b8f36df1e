"""Checks this host's clock, which aligns traces of several hosts, and kinetod's systemd units, if there are any."""

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.base.quantities import format_duration, times

from kinetod.attach.attach_types import Finding, Status
from kinetod.base.libc import LIBC
from kinetod.base.safe_text import clean
from kinetod.host_checks.check_protocol import CheckQuestion

TIMEDATECTL = ("timedatectl", "show", "--property=NTPSynchronized", "--value")
DEADLINE_S = 3.0
_STA_UNSYNC, _STA_NANO, _TIME_ERROR = 0x40, 0x2000, 5  # linux/timex.h
_MUCH_US = 100_000  # of possible error; chrony and ntpd stay far below it
_ADVICE = "start chrony or systemd-timesyncd; chrony informs the kernel if its configuration has `rtcsync`"
BOOTED = Path("/run/systemd/system")  # sd_booted(3)
SERVICE, SOCKET, HELPER = "kinetod.service", "kinetod-attach.socket", "kinetod-attach.service"
WRITER_SOCKET, WRITER = "kinetod-writer.socket", "kinetod-writer.service"  # not enabled by default
UNITS = (SERVICE, SOCKET, HELPER, WRITER_SOCKET, WRITER)
PROPERTIES = ("Id", "LoadState", "ActiveState", "Result", "NRestarts", "MainPID", "UnitFileState")
COMMAND = ("systemctl", "show", f"--property={','.join(PROPERTIES)}", *UNITS)


def check_units(question: CheckQuestion) -> Iterable[Finding]:
    """The findings about the units. Blocking."""
    if not BOOTED.is_dir():
        return [Finding("units", Status.OK, "systemd is not running here")]
    return ask(question)


def ask(question: CheckQuestion, command: Sequence[str] = COMMAND) -> Iterator[Finding]:
    """Asks systemctl. Blocking."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as exc:
        yield Finding("units", Status.UNKNOWN, f"{command[0]} did not answer: {exc}")
        return
    states = parse(done.stdout.decode("utf-8", "replace"))
    if SERVICE not in states:
        said = clean(done.stderr.decode("utf-8", "replace").strip(), 200)
        yield Finding("units", Status.UNKNOWN, f"{command[0]} gave no usable answer: {said or 'no output'}")
        return
    yield from unit_findings(states, question)


def parse(text: str) -> dict[str, dict[str, str]]:
    """The properties of each unit, by its name."""
    units = {}
    for block in text.split("\n\n"):
        unit = {name: value for name, _, value in (line.partition("=") for line in block.splitlines())}
        if name := unit.get("Id"):
            units[name] = unit
    return units


def unit_findings(states: Mapping[str, Mapping[str, str]], question: CheckQuestion) -> Iterator[Finding]:
    """One finding for each installed unit."""
    if states[SERVICE].get("LoadState") == "not-found":
        detail = f"{SERVICE} is not installed; this daemon was started by hand"
        yield Finding("units", Status.OK, detail)
        return
    for name in UNITS:
        if name in states:
            yield _unit(name, states[name], question)


def _unit(name: str, state: Mapping[str, str], question: CheckQuestion) -> Finding:
    active, look = state.get("ActiveState", "?"), f"`systemctl status {name}`, `journalctl -u {name}`"
    if state.get("LoadState") == "not-found":
        return Finding(name, Status.PROBLEM, "not installed, unlike kinetod's other units", "`kinetoctl host install`")
    if state.get("LoadState") not in ("loaded", None):
        return Finding(name, Status.PROBLEM, f"systemd cannot load it: {state['LoadState']}", look)
    if active == "failed":
        return Finding(name, Status.PROBLEM, f"has failed: {state.get('Result') or 'no reason given'}", look)
    if name == WRITER_SOCKET and active == "inactive":
        return Finding(name, Status.OK, "not enabled; only dynolog.log_roots needs it")
    if name in (HELPER, WRITER):  # runs only while in use
        return Finding(name, Status.OK, active)
    if active not in ("active", "activating", "reloading"):
        advice = f"`systemctl enable --now {name}`"
        return Finding(name, Status.PROBLEM if name == SOCKET else Status.NOTE, active, advice)
    if name == SERVICE and state.get("MainPID") not in (str(question.daemon_pid), None):
        detail = f"{active} as pid {state['MainPID']}, but the daemon that is answering has pid {question.daemon_pid}"
        advice = "check whether KINETO_ADDRESS points to a daemon other than the host's"
        return Finding(name, Status.NOTE, detail, advice)
    if state.get("UnitFileState") == "disabled":
        return Finding(name, Status.NOTE, f"{active}, but is not started at boot", f"`systemctl enable {name}`")
    restarts = state.get("NRestarts", "0")
    if name == SERVICE and restarts not in ("0", ""):
        return Finding(name, Status.NOTE, f"{active}; systemd has restarted it {times(int(restarts), 'time')}", look)
    return Finding(name, Status.OK, active)


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


def check_clock(_question: CheckQuestion) -> Iterable[Finding]:
    """Asks the kernel, or systemd if the kernel refuses."""
    try:
        kernel = read()
    except OSError as exc:
        return [by_systemd(str(exc.strerror))]
    return clock_findings(kernel)


def clock_findings(kernel: Kernel) -> Iterator[Finding]:
    """The finding about the clock."""
    name = "clock"
    if not kernel.synchronised:
        detail = "not synchronised, according to the kernel: traces of several hosts will not line up"
        yield Finding(name, Status.NOTE, detail, _ADVICE)
        return
    detail = (
        f"synchronised; {format_duration(1000 * kernel.offset_us)} still to be corrected, estimated error "
        f"{format_duration(1000 * kernel.estimated_error_us)}, possible error "
        f"{format_duration(1000 * kernel.possible_error_us)}"
    )
    if kernel.possible_error_us > _MUCH_US:
        yield Finding(name, Status.NOTE, f"{detail}, which is large", "check that the time servers are responding")
    else:
        yield Finding(name, Status.OK, detail)


def by_systemd(why: str, command: Sequence[str] = TIMEDATECTL) -> Finding:
    """Asks systemd, which has no figures. why: why the kernel could not be asked. Blocking."""
    name = "clock"
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return Finding(
            name,
            Status.UNKNOWN,
            f"the daemon is not allowed to ask the kernel ({why}), and {command[0]} did not answer",
        )
    said = done.stdout.decode("ascii", "replace").strip()
    if said == "yes":
        return Finding(
            name,
            Status.OK,
            f"synchronised, according to {command[0]}; the daemon is not allowed to ask how well ({why})",
        )
    if said == "no":
        return Finding(name, Status.NOTE, "not synchronised: traces of several hosts will not line up", _ADVICE)
    return Finding(
        name, Status.UNKNOWN, f"the daemon is not allowed to ask the kernel ({why}), and {command[0]} did not answer"
    )
