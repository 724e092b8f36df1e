"""How often each line of a Python slice was seen running itself, as a text: "43: 12 running, 3 idle; 51: 2".

For each line the text has the samples by state, the line with the most samples first; the state of a bare number is
unknown. The text is a column of the model (python_function.lines) and an argument of the slices in files, for people to
read.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

STATES = ("", "running", "waiting", "idle")  # by number; the first one means unknown
# Columns of python_function by what a sampled thread waited for, as WAIT_… of kineto_agent.protocol.records number it:
# all but the last two are parts of `idle`; "ready" (for a CPU) and "collecting" (garbage) are parts of `running`.
WAITS = (
    "", "idle_sleep", "idle_lock", "idle_poll", "idle_io", "idle_child", "idle_driver", "idle_memory", "ready",
    "collecting",
)  # fmt: skip
MAX_LINES = 64  # lines that a text names at most: those with the most samples
MAX_LINE = 2**31 - 1
_LINE = re.compile(r"(?<!\d)(\d{1,10}): ([^;]+)")
_COUNT = re.compile(r"(\d{1,9})(?: (running|waiting|idle))?")


class LineCount(NamedTuple):
    """One line and its samples by state, as STATES numbers them."""

    line: int
    counts: tuple[int, int, int, int]

    @property
    def total(self) -> int:
        """Returns the number of all samples."""
        return sum(self.counts)


def format_lines(lines: Iterable[LineCount]) -> str:
    """Formats the counts as text."""
    ordered = sorted(lines, key=lambda entry: (-entry.total, entry.line))[:MAX_LINES]
    return "; ".join(f"{entry.line}: {_counts(entry)}" for entry in ordered)


def parse_lines(text: str) -> list[LineCount]:
    """Parses what format_lines wrote; parts of any other form are skipped."""
    found = []
    for line, counts in _LINE.findall(text):
        if int(line) > MAX_LINE:
            continue
        numbers = {state: int(count) for count, state in _COUNT.findall(counts)}
        unknown, running, waiting, idle = (numbers.get(state, 0) for state in STATES)
        found.append(LineCount(int(line), (unknown, running, waiting, idle)))
    return found


def _counts(entry: LineCount) -> str:
    named = zip((*STATES[1:], STATES[0]), (*entry.counts[1:], entry.counts[0]), strict=True)
    return ", ".join(f"{count} {state}".rstrip() for state, count in named if count)
