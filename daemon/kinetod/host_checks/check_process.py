"""`python -m kinetod.host_checks.check_process`: a Question on standard input, a Line on standard output for each
check.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kinetod import profilers
from kinetod.host_checks.check_protocol import Check, CheckQuestion, Line, packed
from kinetod.host_checks.daemon_checks import check_rights, check_sandbox, check_store
from kinetod.host_checks.gpu_checks import check_devices, check_driver
from kinetod.host_checks.system_checks import check_clock, check_units
from kinetod.processes.profiler_signs import DCGM, EXPORTER
from kinetod.profilers import scan

# The check most likely to hang comes last.
CHECKS: dict[str, Check] = {
    "rights": check_rights,
    "sandbox": check_sandbox,
    "clock": check_clock,
    "units": check_units,
    "driver": check_driver,
    "gpu_devices": check_devices,
    "store": check_store,
}
PROFILERS = "profilers"


def lines(question: CheckQuestion) -> Iterator[Line]:
    """Each line announces the next check, so that a hanging one is known by name."""
    checks = {} if question.only_profilers else CHECKS
    names = [*checks, PROFILERS]
    yield Line(next=names[0])
    for name, following in zip(checks, names[1:], strict=True):
        yield Line(findings=packed(checks[name](question)), next=following)
    found = scan(own=own_processes(question.daemon_pid))
    asked = profilers.profiling() if any(each.product in (DCGM, EXPORTER) for each in found.profilers) else None
    yield Line(scan=found, dcgm=asked)


def own_processes(daemon_pid: int, proc: Path = Path("/proc")) -> frozenset[int]:
    """This process, the daemon, and its children: its counter sampler has CUPTI's libraries, too."""
    own = {os.getpid(), daemon_pid}
    for path in (proc / str(daemon_pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has just ended
            own.update(map(int, path.read_text().split()))
    return frozenset(own)


def main() -> int:
    """Ends when all checks are made."""
    with contextlib.suppress(OSError):
        os.nice(5)  # everything else on this host has priority
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckQuestion)
    for line in lines(question):
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
