"""The protocol with the process that checks the host.

Theory of operation
    check_runner.py (in the daemon)    asks the process, with a deadline, and takes its answers so far
    check_process.py (the process)     runs the checks one after the other, a line of JSON for each
    a check                      a function from the question to findings, in the file of its subject

    Mounts, drivers, other users' processes and other programs may block a reader; so the daemon does not read them.
    Facts that only the daemon has (GPUs, the attach helper, the caller) are added in rpc/diagnose_host.py.
"""

from collections.abc import Callable, Iterable

import msgspec

from kinetod.attach.attach_types import Finding, Status
from kinetod.profilers import Profiling, Scan


class CheckQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the daemon that the checks need."""

    daemon_pid: int
    store: str
    needed_bytes: int  # free space on the store's disk that a capture needs to begin
    helper: bool  # whether the attach helper service is used
    attaching: bool = True  # whether the daemon attaches at all
    only_profilers: bool = False  # and no other checks


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one check. next: the check that begins now; empty after the last."""

    findings: tuple[tuple[str, str, str, str], ...] = ()  # name, status, detail, advice
    scan: Scan | None = None
    dcgm: tuple[Profiling, str] | None = None
    next: str = ""


Check = Callable[[CheckQuestion], Iterable[Finding]]


def packed(findings: Iterable[Finding]) -> tuple[tuple[str, str, str, str], ...]:
    """The findings in the form of a line."""
    return tuple((each.name, each.status.value, each.detail, each.advice) for each in findings)


def unpacked(findings: Iterable[tuple[str, str, str, str]]) -> list[Finding]:
    """The findings of a line. Raises ValueError."""
    return [Finding(name, Status(status), detail, advice) for name, status, detail, advice in findings]
