"""`python -m kinetod.host_checks.check_process`: a Question on standard input, a Line on standard output for each
check.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import msgspec

from kinetod.host_checks import (
    clock_check,
    disk_check,
    driver_check,
    gpu_devices_check,
    rights_check,
    sandbox_check,
    systemd_check,
)
from kinetod.host_checks.check_protocol import Check, CheckQuestion, Line, packed
from kinetod.processes.profiler_signs import DCGM, EXPORTER
from kinetod.profilers import dcgm
from kinetod.profilers.profiler_scan import scan

# What is most likely to hang comes last.
CHECKS: dict[str, Check] = {
    "rights": rights_check.check,
    "sandbox": sandbox_check.check,
    "clock": clock_check.check,
    "units": systemd_check.check,
    "driver": driver_check.check,
    "gpu_devices": gpu_devices_check.check,
    "store": disk_check.check,
}
PROFILERS = "profilers"


def lines(question: CheckQuestion) -> Iterator[Line]:
    """Each announces the next check, so that one which hangs is known by its name."""
    checks = {} if question.only_profilers else CHECKS
    names = [*checks, PROFILERS]
    yield Line(next=names[0])
    for name, following in zip(checks, names[1:], strict=True):
        yield Line(findings=packed(checks[name](question)), next=following)
    found = scan(own=frozenset({os.getpid(), question.daemon_pid}))
    asked = dcgm.profiling() if any(each.product in (DCGM, EXPORTER) for each in found.profilers) else None
    yield Line(scan=found, dcgm=asked)


def main() -> int:
    """Ends when all checks are made."""
    with contextlib.suppress(OSError):
        os.nice(5)  # whatever runs on this host goes first
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckQuestion)
    for line in lines(question):
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
