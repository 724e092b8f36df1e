"""Self samples of each line of a Python slice, as a text: "43: 12 running, 3 idle; 51: 2".

For each line the text has the samples by state, the line with the most samples first; the state of a bare number is
unknown. A second text has the samples at calls of functions outside Python, by line and callee: "43 pickle.dumps: 9
running; 43 .tolist: 3 idle". A callee has its name in the source; one that begins with a dot is an attribute of a value
without a name. The texts are columns of the model (python_function.lines and .callees) and arguments of the slices in
files, for people to read.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

STATES = ("", "running", "waiting", "idle")  # by number; the first one means unknown
# Columns of python_function by the reason for which a sampled thread waited, numbered as WAIT_… of
# kineto_agent.protocol.records: all but the last two are parts of `idle`; "ready" (for a CPU) and "collecting"
# (garbage) are parts of `running`.
WAITS = (
    "", "idle_sleep", "idle_lock", "idle_poll", "idle_io", "idle_child", "idle_driver", "idle_memory", "ready",
    "collecting",
)  # fmt: skip
MAX_LINES = 64  # limit of lines, or lines and callees, in a text: those with the most samples
MAX_LINE = 2**31 - 1
_LINE = re.compile(r"(?<!\d)(\d{1,10}): ([^;]+)")
_CALLEE = re.compile(r"(?<!\S)(\d{1,10}) ([A-Za-z_.][A-Za-z_0-9.]*): ([^;]+)")
_COUNT = re.compile(r"(\d{1,9})(?: (running|waiting|idle))?")


Counts = tuple[int, int, int, int]


class LineCount(NamedTuple):
    """One line and its samples by state, as STATES numbers them."""

    line: int
    counts: Counts

    @property
    def total(self) -> int:
        """Returns the number of all samples."""
        return sum(self.counts)


class CalleeCount(NamedTuple):
    """One callee at one line, and the samples in it by state."""

    line: int
    callee: str
    counts: Counts


def format_lines(lines: Iterable[LineCount]) -> str:
    """Formats the counts as text."""
    ordered = sorted(lines, key=lambda entry: (-entry.total, entry.line))[:MAX_LINES]
    return "; ".join(f"{entry.line}: {_counts_text(entry.counts)}" for entry in ordered)


def parse_lines(text: str) -> list[LineCount]:
    """Parses the output of format_lines; parts of any other form are skipped."""
    told = _LINE.findall(text)
    return [LineCount(int(line), _counts(counts)) for line, counts in told if int(line) <= MAX_LINE]


def format_callees(callees: Iterable[CalleeCount]) -> str:
    """Formats the counts by callee as text."""
    ordered = sorted(callees, key=lambda entry: (-sum(entry.counts), entry.line, entry.callee))[:MAX_LINES]
    return "; ".join(f"{entry.line} {entry.callee}: {_counts_text(entry.counts)}" for entry in ordered)


def parse_callees(text: str) -> list[CalleeCount]:
    """Parses the output of format_callees; parts of any other form are skipped."""
    told = _CALLEE.findall(text)
    return [CalleeCount(int(line), name, _counts(counts)) for line, name, counts in told if int(line) <= MAX_LINE]


def _counts(text: str) -> Counts:
    numbers = {state: int(count) for count, state in _COUNT.findall(text)}
    unknown, running, waiting, idle = (numbers.get(state, 0) for state in STATES)
    return unknown, running, waiting, idle


def _counts_text(counts: Counts) -> str:
    named = zip((*STATES[1:], STATES[0]), (*counts[1:], counts[0]), strict=True)
    return ", ".join(f"{count} {state}".rstrip() for state, count in named if count)
