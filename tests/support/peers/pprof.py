"""pprof itself, for tests: Debian's Go has it as a program of its own, which needs no Go to run."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_PLACES = ("/usr/lib/go-*/pkg/tool/*/pprof", "/usr/lib/go/pkg/tool/*/pprof")
GET = "apt-get install golang-go"  # what a skipped test tells the reader to do


def program() -> str | None:
    """The program: what the variable PPROF names, `pprof` of PATH, or Go's; None: there is none."""
    if named := os.environ.get("PPROF") or shutil.which("pprof"):
        return named
    found = sorted(str(path) for place in _PLACES for path in Path("/").glob(place[1:]))
    return found[-1] if found else None


def shown(path: Path, *options: str) -> str:
    """What pprof prints for a file. Raises AssertionError with its message if it does not accept the file."""
    wanted = program()
    if wanted is None:
        pytest.skip(f"no pprof: {GET}")
    command: Sequence[str] = [wanted, *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
