"""The times of declared records: which clock they are of, what they are in Unix time, and which are impossible."""

from collections.abc import Iterable

import numpy as np
from kineto_agent.protocol.schema import DEVICE, REALTIME, Record

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.decode.declared.record_clocks import (
    LATEST_NS,
    MAX_SAMPLES,
    ClockLine,
    Pair,
    any_rate,
    as_readings,
    line_of,
    samples_of,
)
from kineto_trace.decode.declared.record_set import Ints, Mask, RecordSet, Rows, counted
from kineto_trace.decode.decoded import DecodeWindow

AFTER_NS = 600 * 10**9  # after the window a recording goes on for seconds: an end later than this is impossible
BEFORE_NS = 366 * 24 * 3600 * 10**9  # a start longer than this before the window is impossible
_MAX_DEVICES = 256
_ALL_DEVICES = -1


class Clocks:
    """The clocks of a set of records; those of devices by the value of the record's device field."""

    def __init__(self, found: RecordSet) -> None:
        self._found = found
        self._lines: dict[str, ClockLine | None] = {}
        self._of_device: dict[int, ClockLine] = {}
        for rows in found.rows.values():
            if any(rows.record.sync) and len(rows):
                self._add_devices(rows)

    def to_unix(self, rows: Rows, times: Ints, clock: str) -> tuple[Ints, Mask]:
        """Converts readings above 0. Returns Unix ns, and for which of them there is a clock."""
        if clock == REALTIME:
            return times, np.ones(len(times), np.bool_)
        if clock == DEVICE and self._of_device and _ALL_DEVICES not in self._of_device:
            return self._by_device(rows, times)
        line = self._of_device.get(_ALL_DEVICES) if clock == DEVICE else None
        line = self._sampled(clock) if line is None else line
        if line is None:
            return times, np.zeros(len(times), np.bool_)
        return line.to_unix(times), np.ones(len(times), np.bool_)

    def _by_device(self, rows: Rows, times: Ints) -> tuple[Ints, Mask]:
        device, unix, known = _devices(rows), times.copy(), np.zeros(len(times), np.bool_)
        for number, line in self._of_device.items():
            own = device == number
            unix[own] = line.to_unix(times[own])
            known |= own
        return unix, known

    def _sampled(self, clock: str) -> ClockLine | None:
        if clock not in self._lines:
            self._lines[clock] = self._line(samples_of(self._found.source, clock), clock, "")
        return self._lines[clock]

    def _add_devices(self, rows: Rows) -> None:
        """Adds the clock of each device of which there are readings among these records."""
        reading, unix = (as_readings(rows.field(name)) for name in rows.record.sync)
        has_device = bool(rows.record.device)
        device = _devices(rows) if has_device else np.full(len(rows), _ALL_DEVICES)
        for number in unique_values(device)[:_MAX_DEVICES].tolist():
            own = np.flatnonzero(device == number)
            own = own[:: -(-len(own) // MAX_SAMPLES)]
            pairs = zip(unix[own].tolist(), reading[own].tolist(), strict=True)
            line = self._line(pairs, DEVICE, f" of device {number}" if has_device else "")
            if line is not None:
                self._of_device[number] = line

    def _line(self, pairs: Iterable[Pair], clock: str, whose: str) -> ClockLine | None:
        nominal = self._found.schema.tick_ns if clock == DEVICE else 1.0
        line, problem = line_of(pairs, nominal_ns=nominal, free=any_rate(clock))
        if problem:
            self._found.warnings.append(f"the clock {clock}{whose}: {problem}")
        return line


def _devices(rows: Rows) -> Ints:
    name = rows.record.device
    return rows.field(name).astype(np.int64) if name else np.full(len(rows), _ALL_DEVICES)


def fill_times(found: RecordSet, rows: Rows, clocks: Clocks, window: DecodeWindow) -> None:
    """Adds the columns start (Unix ns) and duration (ns), and leaves out records whose times are impossible."""
    record, kind = rows.record, f"of kind {rows.kind}"
    start, end = _readings(rows, record)
    missing = (start == 0) | (end == 0)
    impossible = ~missing & ((start < 0) | (end < 0) | (start > LATEST_NS) | (end > LATEST_NS))
    found.lose(int(np.count_nonzero(missing)), f"{kind} without a time")
    found.lose(int(np.count_nonzero(impossible)), f"{kind} with impossible times")
    usable = ~(missing | impossible)
    rows.keep(usable)
    clock = record.clock or found.schema.clock
    start, known = clocks.to_unix(rows, start[usable], clock)
    end, _ = clocks.to_unix(rows, end[usable], clock)
    found.lose(
        int(np.count_nonzero(~known)), f"{kind} with times of the clock {clock}, of which no samples came with them"
    )
    backwards = int(np.count_nonzero(known & (end < start)))
    if backwards:
        found.warnings.append(f"{counted(backwards, kind)} with an end before the start: 0 is their duration")
    end = np.maximum(start, end)
    far = known & _is_far(start, end, window)
    found.lose(int(np.count_nonzero(far)), f"{kind} with times far from the recording")
    rows.columns = {"start": start, "duration": end - start}
    rows.keep(known & ~far)


def _readings(rows: Rows, record: Record) -> tuple[Ints, Ints]:
    """Returns starts and ends as the clock shows them; a negative value is impossible."""
    first, last = record.time
    start = as_readings(rows.field(first))
    if not last:
        return start, start
    end = as_readings(rows.field(last))
    if not record.length:
        return start, end
    possible = (start >= 0) & (end >= 0) & (start <= LATEST_NS) & (end <= LATEST_NS)
    return start, np.where(
        start == 0, 0, np.where(possible, np.where(possible, start, 0) + np.where(possible, end, 0), -1)
    )


def _is_far(start: Ints, end: Ints, window: DecodeWindow) -> Mask:
    far: Mask = start <= 0
    if window.end_ns:
        far |= (end > window.end_ns + AFTER_NS) | (start < window.start_ns - BEFORE_NS)
    return far
