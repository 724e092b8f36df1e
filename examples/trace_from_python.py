"""Traces running processes from a program, and prints what became of each and which lines of Python ran.

    python examples/trace_from_python.py PID [PID ...]

The daemon is the one that kinetoctl would ask, and the trace takes the usual five seconds. docs/orchestration.md has
the options, and captures of whole jobs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from kinetoctl import api
from kinetoctl.errors import CliError

FOLDER = Path("traces")


def trace(pids: Sequence[int], folder: Path = FOLDER) -> bool:
    """Takes one trace of all these processes. Returns whether nothing is missing in it."""
    capture = api.capture(api.Selection(pids=tuple(pids)))
    result = capture.wait(timeout_s=60)
    for process in result.processes:
        print(f"pid {process.pid} on {process.host}: {process.verdict} {process.reason}".rstrip())

    files = capture.fetch(folder)
    print(f"the traces are in {files.folder}")
    for row in capture.report("python_samples")[:5]:
        print(f"{row['running_pct']:5.1f} %  {row['function']} line {row['line']}")
    for row in capture.report("findings")[:3]:
        print(f"{row['title']}: {row['advice']}")
    return result.done


def main() -> int:
    """Exits with the code that kinetoctl would exit with."""
    try:
        return 0 if trace([int(pid) for pid in sys.argv[1:]]) else 4
    except CliError as error:
        print(f"{error} [{error.reason_code}]" if error.reason_code else str(error), file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
