"""Programs that hang, in the ways of support/agent/hanging.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "agent/hanging.py"


@contextmanager
def hanging(kind: str, *arguments: str, interpreter: str = sys.executable) -> Iterator[int]:
    """The pid of a program that hangs."""
    with subprocess.Popen(
        [interpreter, str(PROGRAM), kind, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            word, pid = process.stdout.readline().split()
            assert word == "hangs"
            yield int(pid)
        finally:
            os.killpg(process.pid, 9)
