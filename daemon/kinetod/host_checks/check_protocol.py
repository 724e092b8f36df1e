"""What is asked of the process that looks at the host, and what it answers.

Theory of operation
    check_runner.py (in the daemon)    asks the process, with a deadline, and takes what it has said by then
    check_process.py (the process)     runs the checks one after the other, a line of JSON for each
    a check                      a function from the question to findings, in the file of its subject

    Mounts, drivers, other users' processes and other programs may hang whoever looks at them; so the daemon does not.
    What only the daemon knows (GPUs, the attach helper, who asks) is joined in rpc/diagnose_host.py.
"""

from collections.abc import Callable, Iterable

import msgspec

from kinetod.attach.finding import Finding, Status
from kinetod.profilers.dcgm import Profiling
from kinetod.profilers.profiler_scan import Scan


class CheckQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks need to know about the daemon."""

    daemon_pid: int
    store: str
    needed_bytes: int  # free on the store's disk for a capture to begin
    helper: bool  # whether the attach helper service is used
    attaching: bool = True  # whether the daemon brings agents in at all
    only_profilers: bool = False  # and none of the checks


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check found. next: the check that begins now; empty after the last."""

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
