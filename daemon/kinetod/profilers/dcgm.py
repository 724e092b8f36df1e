"""DCGM by its own command: whether it is measuring with hardware counters."""

import re
import subprocess
from collections.abc import Sequence
from enum import StrEnum

from kinetod.base.safe_text import clean

COMMAND = ("dcgmi",)
DEADLINE_S = 3.0
_ROW = re.compile(r"^\|\s*\d+\s*\|\s*Profiling\s*\|\s*(.*?)\s*\|$", re.MULTILINE)


class Profiling(StrEnum):
    """State of DCGM's module for fields such as DCGM_FI_PROF_SM_ACTIVE, which it loads on their first use."""

    LOADED = "loaded"
    NOT_LOADED = "not loaded"
    UNKNOWN = "unknown"


def profiling(command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S) -> tuple[Profiling, str]:
    """Whether the module is loaded, and why that is not known. Blocking."""
    try:
        done = subprocess.run(
            [*command, "modules", "--list"],
            capture_output=True,
            timeout=deadline_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return Profiling.UNKNOWN, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return Profiling.UNKNOWN, f"{command[0]} did not answer within {deadline_s:g} s"
    except OSError as exc:
        return Profiling.UNKNOWN, f"{command[0]} cannot be started: {exc.strerror}"
    said = done.stdout.decode("utf-8", "replace")
    if match := _ROW.search(said):
        state = match[1].lower()
        return (Profiling.LOADED if state == "loaded" else Profiling.NOT_LOADED), ""
    last = (said + done.stderr.decode("utf-8", "replace")).strip().rpartition("\n")[2]
    return Profiling.UNKNOWN, f"{command[0]} says: {clean(last, 200) or 'nothing'}"
