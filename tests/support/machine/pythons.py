"""CPython releases of this machine, for tests of what differs between them."""

import os
import sys
from pathlib import Path

import pytest

from support.machine import newer_pythons

PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def python(version: str) -> Path:
    """An executable of this version; skips the test where there is none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    found = newer_pythons.find(version) or next(iter(sorted(PYENV.glob(f"{version}.*/bin/python"))), None)
    if found is None:
        pytest.skip(f"no CPython {version}")
    return found
