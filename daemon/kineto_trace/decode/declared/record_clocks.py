"""Converts the times of declared records from their clock to Unix time.

Theory of operation
    A source hands over samples of its clock, each a pair of Unix ns and a reading. Between two samples a straight line
    converts readings, so that offset and drift are those that were measured, and a step of the system's clock moves
    only what lies around it. Before the first and after the last sample the line through both of them goes on. A
    single sample gives the offset; a tick then has its nominal length.

    Samples may be wrong. Those that do not ascend with the others are left out, and a rate that no clock of this kind
    can have is replaced by the nominal one, with a warning.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.records import CLOCK_PAIR, SPACE_CLOCK_PAIR
from kineto_agent.protocol.schema import CLOCKS_KEY, DEVICE, MONOTONIC, TSC

from kineto_trace.spool.raw_records import RawSource

Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]  # Unix ns, reading
LATEST_NS = 1 << 62  # in the year 2116: later times, and readings, are impossible
MAX_SAMPLES = 65_536
_LEAST_APART_NS = 10_000_000  # samples are accurate to a microsecond: nearer ones would say nothing of the rate
_GREATEST_DRIFT = 0.01  # of a clock that counts ns
_HEADER_READINGS = {TSC: 1, MONOTONIC: 2}  # places in the samples of the arena's header


class ClockLine(NamedTuple):
    """A clock: readings at some moments, ascending, Unix ns then, and the rates between, before and after them."""

    reading: Ints
    unix: Ints
    rate: npt.NDArray[np.float64]  # ns per tick; one entry more than there are readings

    def to_unix(self, readings: Ints) -> Ints:
        """Converts readings from 1 to LATEST_NS; what is out of Unix time's range becomes its nearest end."""
        after = np.searchsorted(self.reading, readings, "right")
        from_sample = np.maximum(after - 1, 0)
        far = (readings - self.reading[from_sample]) * self.rate[after]
        near = np.clip(np.rint(far), -LATEST_NS, LATEST_NS).astype(np.int64)
        unix: Ints = np.clip(self.unix[from_sample] + near, 0, LATEST_NS)
        return unix


def line_of(pairs: Iterable[Pair], *, nominal_ns: float, free: bool) -> tuple[ClockLine | None, str]:
    """Returns the clock of these samples (None: there is no usable one) and what is wrong with them ("": nothing).

    nominal_ns: length of a tick. free: any rate is possible.
    """
    known = _ascending(pairs)
    if not known:
        return None, ""
    unix, reading = (np.array(column, np.int64) for column in zip(*known, strict=True))
    rate = np.full(len(known) + 1, nominal_ns)
    if len(known) == 1:
        return ClockLine(reading, unix, rate), ""
    rate[1:-1] = np.diff(unix) / np.diff(reading)
    rate[0] = rate[-1] = (unix[-1] - unix[0]) / (reading[-1] - reading[0])
    drift = abs(rate[0] / nominal_ns - 1)
    if not free and drift > _GREATEST_DRIFT:
        first = ClockLine(reading[:1], unix[:1], np.full(2, nominal_ns))
        return (
            first,
            f"its clock seems to be {100 * drift:.3g} % off, which is impossible: only its first sample counts",
        )
    return ClockLine(reading, unix, rate), ""


def _ascending(pairs: Iterable[Pair]) -> list[Pair]:
    """The samples whose both values ascend, each far enough from the one before."""
    found: list[Pair] = []
    for unix, reading in sorted(pair for pair in pairs if all(0 < value < LATEST_NS for value in pair)):
        if not found or (unix - found[-1][0] >= _LEAST_APART_NS and reading > found[-1][1]):
            found.append((unix, reading))
    return found


def samples_of(source: RawSource, clock: str) -> list[Pair]:
    """Returns the samples of this clock that came with the records; values that make no sense are left out."""
    table = source.strings.get(SPACE_CLOCK_PAIR, {})
    found = [(unix, CLOCK_PAIR.unpack(text)[0]) for unix, text in table.items() if len(text) == CLOCK_PAIR.size]
    samples = source.metadata.get(CLOCKS_KEY)
    for sample in samples if isinstance(samples, list) else ():
        if isinstance(sample, Sequence) and all(type(value) is int for value in sample):
            found.extend(_pair(sample, clock))
    return found[:: -(-len(found) // MAX_SAMPLES) or 1]


def _pair(sample: Sequence[int], clock: str) -> list[Pair]:
    if len(sample) == 2:
        return [(sample[0], sample[1])]
    place = _HEADER_READINGS.get(clock)
    return [(sample[0], sample[place])] if place is not None and len(sample) == 3 else []


def any_rate(clock: str) -> bool:
    """Tells whether a tick of this clock may have any length: those of the others are ns."""
    return clock in (DEVICE, TSC)


def as_readings(values: npt.NDArray[Any]) -> Ints:
    """Returns 64-bit fields as signed numbers: what is negative or above 2^63 is negative, and impossible."""
    readings: Ints = values.astype(np.int64)
    return readings
