"""Converts the times of CUPTI's records from any of their clocks to Unix time.

Theory of operation
    CUPTI's own times are Unix ns. In a process that has used torch's profiler they are readings of the processor's time
    stamp counter or of CLOCK_MONOTONIC (agent/native/cupti/clock_samples.c). The source provides two samples of all
    clocks, from the beginning and the end of the recording: the records use the clock whose samples are nearest to
    their times, and a straight line through its samples converts them. All records of one kind use the same clock.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_LEAST_APART_NS = 1_000_000  # a sample is accurate to some 30 ns
_READINGS = 3  # in each sample: Unix ns, counter, monotonic ns


class CuptiClock(NamedTuple):
    """One clock at two moments: its readings, and Unix ns."""

    first: int
    last: int
    unix_first: int
    unix_last: int

    def distance(self, time: int) -> int:
        """Returns how far a reading is outside the interval of the samples."""
        return max(self.first - time, time - self.last, 0)

    def scale(self) -> float:
        """Returns the length of one tick, in ns."""
        return (self.unix_last - self.unix_first) / (self.last - self.first)

    def to_unix(self, times: Ints) -> Ints:
        """Converts readings to Unix ns; 0 stays 0, which means no time."""
        moved: Ints = np.rint((times - self.first) * self.scale()).astype(np.int64) + self.unix_first
        moved[times == 0] = 0
        return moved

    def length_ns(self, durations: Ints) -> Ints:
        """Converts durations in ticks to ns."""
        lengths: Ints = np.rint(durations * self.scale()).astype(np.int64)
        return lengths


def clocks_of(samples: Any) -> list[CuptiClock]:
    """Returns the clocks in a source's metadata["clocks"], Unix time first; none if the value is malformed."""
    if not _well_formed(samples):
        return []
    first, last = samples
    if last[0] - first[0] < _LEAST_APART_NS:
        return []
    found = [CuptiClock(first[at], last[at], first[0], last[0]) for at in range(_READINGS)]
    return [clock for clock in found if clock.last > clock.first > 0]


def _well_formed(samples: Any) -> bool:
    return (
        isinstance(samples, Sequence)
        and len(samples) == 2
        and all(
            isinstance(sample, Sequence)
            and len(sample) == _READINGS
            and all(isinstance(reading, int) and 0 <= reading < 1 << 62 for reading in sample)
            for sample in samples
        )
    )


def foreign_clock(starts: Ints, clocks: Sequence[CuptiClock]) -> CuptiClock | None:
    """Returns the clock of these readings; None if it is Unix time or cannot be determined."""
    known = starts[starts > 0]
    if not len(known) or not clocks:
        return None
    middle = int(np.median(known))
    nearest = min(clocks, key=lambda clock: clock.distance(middle))
    return None if nearest is clocks[0] else nearest


def translate(columns: dict[str, npt.NDArray[Any]], clocks: Sequence[CuptiClock]) -> bool:
    """Converts the times in these columns to Unix ns. Returns False if they were Unix ns already."""
    clock = foreign_clock(columns["start"], clocks)
    if clock is None:
        return False
    columns["start"] = clock.to_unix(columns["start"])
    columns["duration"] = clock.length_ns(columns["duration"])
    if "queued" in columns:
        columns["queued"] = clock.to_unix(columns["queued"].astype(np.int64)).astype(columns["queued"].dtype)
    return True
