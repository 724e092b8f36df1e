"""What a process has open."""

from __future__ import annotations  # the agent's tests run under 3.9

import contextlib
from pathlib import Path


def open_files(pid: int) -> dict[int, str]:
    """What each descriptor names. One that is closed at this moment is left out."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(entry.name)] = str(entry.readlink())
    return found
