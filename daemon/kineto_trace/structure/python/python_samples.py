"""Samples of Python stacks by function, line and state: what ran, what waited for the GIL, what was idle.

Only the innermost frame of a sample counts. Samples that do not tell the thread's state (of older captures and
other tools) have an unknown one; they rank like running ones, since nothing better is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.model.line_counts import STATES, WAITS, parse_lines
from kineto_trace.model.trace import Table, Trace
from kineto_trace.model.trace_header import value

UNKNOWN, RUNNING, WAITING, IDLE = range(len(STATES))
MAX_PERIOD_NS = 10**12
_IDLE = "idle_"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LineSamples:
    """Self samples of slices, one value per slice and line.

    row: of python_function. line: 0: unknown. counts: by state. busy: running or unknown.
    """

    row: Ints
    line: Ints
    counts: npt.NDArray[np.int64]  # (…, 4)

    @property
    def busy(self) -> Ints:
        """Returns the number of samples in which it ran or its state is unknown."""
        total: Ints = self.counts[:, RUNNING] + self.counts[:, UNKNOWN]
        return total


def state_counts(table: Table) -> npt.NDArray[np.int64]:
    """Returns the self samples by state for each row of python_function; negative ones of odd files are none."""
    known = np.maximum(np.stack([table[name].astype(np.int64) for name in STATES[1:]], axis=1), 0)
    unknown = np.maximum(table["self_samples"] - known.sum(axis=1), 0)
    return np.column_stack([unknown, known])


def line_samples(trace: Trace) -> LineSamples:
    """Returns all self samples of the trace by slice and line."""
    table = trace.table("python_function")
    rows = np.flatnonzero(table["self_samples"] > 0)
    numbers, place = np.unique(table["lines"][rows], return_inverse=True)
    place = place.reshape(-1)
    texts = [parse_lines(trace.strings[number]) if number >= 0 else [] for number in numbers.tolist()]
    flat = [entry for text in texts for entry in text]
    lines = np.array([entry.line for entry in flat], np.int64)
    counts = np.array([entry.counts for entry in flat], np.int64).reshape(-1, len(STATES))
    size = np.array([len(text) for text in texts], np.int64)[place]
    first = np.cumsum([0, *map(len, texts)])[:-1][place]
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    chosen = np.repeat(first, size) + within
    told = np.zeros((len(rows), len(STATES)), np.int64)
    np.add.at(told, np.repeat(np.arange(len(rows)), size), counts[chosen])
    rest = np.maximum(state_counts(table)[rows] - told, 0)
    without = np.flatnonzero(rest.sum(axis=1) > 0)
    return LineSamples(
        np.concatenate([np.repeat(rows, size), rows[without]]),
        np.concatenate([lines[chosen], np.zeros(len(without), np.int64)]),
        np.concatenate([counts[chosen], rest[without]]),
    )


def idle_for(counts: Sequence[int]) -> str | None:
    """Returns what idle samples waited for as text, "lock 12, sleep 3"; None if it is not known of any.

    counts: one for each of WAITS.
    """
    named = zip(counts, WAITS, strict=True)
    parts = sorted(((count, name.removeprefix(_IDLE)) for count, name in named if name.startswith(_IDLE)), reverse=True)
    return ", ".join(f"{name} {count}" for count, name in parts if count) or None


def sample_period_ns(trace: Trace) -> int:
    """Returns the time between two samples of a thread; 0 if unknown."""
    if trace.sample_period_ns or trace.head is None:
        return trace.sample_period_ns
    ours = value(trace.head, "kinetod")
    found = ours.get("sample_period_ns") if isinstance(ours, Mapping) else None
    return found if type(found) is int and 0 < found < MAX_PERIOD_NS else 0
