"""pprof itself, for tests: Go brings it, and Debian's Go as a program that is built already."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_PLACES = ("/usr/lib/go-*/pkg/tool/*/pprof", "/usr/lib/go/pkg/tool/*/pprof")
GET = "apt-get install golang-go"  # what a skipped test tells the reader to do


def program() -> list[str]:
    """The command: what the variable PPROF names, `pprof` of PATH, or Go's tool; empty: there is none."""
    if named := os.environ.get("PPROF") or shutil.which("pprof"):
        return [named]
    found = sorted(str(path) for place in _PLACES for path in Path("/").glob(place[1:]))
    if found:
        return [found[-1]]
    return ["go", "tool", "pprof"] if shutil.which("go") else []


def shown(path: Path, *options: str) -> str:
    """What pprof prints for a file. Raises AssertionError with its message if it does not accept the file."""
    command = program()
    if not command:
        pytest.skip(f"no pprof: {GET}")
    done = subprocess.run([*command, *options, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
