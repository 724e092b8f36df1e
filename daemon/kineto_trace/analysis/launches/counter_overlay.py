"""A trace with counters of its queue lengths and of the bandwidth of its copies, for viewers of traces.

Theory of operation
    Counters are events of phase C: rows of the table `other` that look as if they had been in the file, so that every
    exporter writes them. As in HTA's traces with counters they stand in the process of their device: "Queue Length"
    with the stream as its id, and one counter per kind of copy with the value "Memcpy BW" (GB/s).
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.copy_bandwidth import bandwidths
from kineto_trace.analysis.launches.queue_lengths import queues
from kineto_trace.model.context import Context
from kineto_trace.model.event_kinds import ARGS, ID, NAME, PHASE, PID, TS
from kineto_trace.model.trace import NO_STRING, ORIGIN_COLUMNS, Table, Trace, make_table
from kineto_trace.view_api.view import Compat

QUEUE_LENGTH = "Queue Length"
BANDWIDTH = "Memcpy BW"
_COUNTER = ord("C")
_TABLE = "other"

Ints = npt.NDArray[np.int64]


def with_counters(
    trace: Trace, *, queue_length: bool = True, bandwidth: bool = True, compat: Compat = Compat.NONE
) -> Trace:
    """The trace with counter rows. compat: HTA: its values (generate_trace_with_counters)."""
    context = Context(trace)
    rows = _Rows(trace)
    if queue_length:
        found = queues(context, compat)
        names = np.full(len(found.time), rows.string(QUEUE_LENGTH), np.int32)
        rows.add(found.time, np.maximum(found.device, 0), names, (QUEUE_LENGTH, found.length), found.stream)
    if bandwidth:
        copies = bandwidths(context, compat)
        numbers = np.array([rows.string(kind) for kind in copies.kinds], np.int32)
        names = numbers[copies.kind] if len(numbers) else np.empty(0, np.int32)
        rows.add(copies.time, np.maximum(copies.device, 0), names, (BANDWIDTH, copies.bandwidth), None)
    return replace(trace, strings=tuple(rows.strings), tables={**trace.tables, _TABLE: rows.table()})


class _Rows:
    """Collects counter rows."""

    def __init__(self, trace: Trace) -> None:
        self.strings = list(trace.strings)
        self._numbers: dict[str, int] = {}
        self._existing = trace.table(_TABLE)
        places = [table.origin["place"] for table in trace.tables.values() if len(table) and "place" in table.origin]
        self._place = max((int(column.max()) for column in places), default=-1) + 1
        self._parts: list[Table] = []

    def string(self, text: str) -> int:
        """The number of a text that is new to the trace."""
        if text not in self._numbers:
            self._numbers[text] = len(self.strings)
            self.strings.append(text)
        return self._numbers[text]

    def add(
        self,
        time: Ints,
        device: Ints,
        name: npt.NDArray[np.int32],
        counted: tuple[str, npt.NDArray[Any]],
        ids: Ints | None,
    ) -> None:
        """One series. counted: the argument's name, and its values."""
        count = len(time)
        values, place = np.unique(counted[1], return_inverse=True)
        numbers = np.array([self.string(f"{json.dumps(counted[0])}:{value!r}") for value in values.tolist()], np.int32)
        present = PHASE | NAME | PID | TS | ARGS | (0 if ids is None else ID)
        columns: dict[str, npt.NDArray[Any]] = {
            "start": time,
            "name": name,
            "category": np.full(count, NO_STRING, np.int32),
            "phase": np.full(count, _COUNTER, np.uint8),
        }
        origin: dict[str, npt.NDArray[Any]] = {
            "pid": device,
            "tid": np.zeros(count, np.int64),
            "category": columns["category"],
            "present": np.full(count, present, np.uint64),
            "args": numbers[place] if count else np.empty(0, np.int32),
            "members": np.full(count, NO_STRING, np.int32),
            "place": np.arange(self._place, self._place + count, dtype=np.uint32),
            "member_id": np.zeros(count, np.int64) if ids is None else ids,
        }
        self._place += count
        self._parts.append(make_table(_TABLE, count, columns, origin))

    def table(self) -> Table:
        """All rows: those of the trace, and then the new ones."""
        parts = [self._existing, *self._parts] if len(self._existing) else self._parts
        names = dict.fromkeys(name for part in parts for name in part.origin)
        types = {column.name: column.dtype for column in ORIGIN_COLUMNS}
        columns = {name: np.concatenate([part[name] for part in parts]) for name in self._existing.columns}
        origin = {name: np.concatenate([_column(part, name) for part in parts]) for name in names}
        origin = {name: column.astype(types.get(name, column.dtype), copy=False) for name, column in origin.items()}
        return make_table(_TABLE, sum(map(len, parts)), columns, origin)


def _column(table: Table, name: str) -> npt.NDArray[Any]:
    found = table.origin.get(name)
    return np.zeros(len(table), np.int64) if found is None else found
