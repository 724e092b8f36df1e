"""Decodes allocator actions ("memory_events/1") into the table cpu_instant_event: [memory] and [OutOfMemory] rows.

The source states what each device held when the recording ended (`metadata["totals"]`); the totals after earlier
actions are computed backwards from there. Sizes are those that the program requested, times are truncated to
microseconds. torch's history does not record the thread.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kineto_agent.protocol.records import (
    MEMORY_ALLOCATED,
    MEMORY_EVENT_FIELDS,
    MEMORY_EVENTS_FORMAT,
    MEMORY_FREED,
    MEMORY_OUT_OF_MEMORY,
    MEMORY_RELEASED,
    MEMORY_RESERVED,
)

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Ints
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, fixed_records, record_dtype
from kineto_trace.model.trace import StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = MEMORY_EVENTS_FORMAT
NAME, OUT_OF_MEMORY_NAME = "[memory]", "[OutOfMemory]"
CUDA = 1  # c10::DeviceType
UNKNOWN = -1
_EVENT = record_dtype(MEMORY_EVENT_FIELDS)


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all records; names go into `strings`. Implausible records count as undecoded."""
    events, cut = fixed_records(source, _EVENT)
    known = (events["action"] >= MEMORY_ALLOCATED) & (events["action"] <= MEMORY_OUT_OF_MEMORY)
    known &= events["bytes"] < 1 << 62
    kept = events[known]
    totals = source.metadata.get("totals")
    table = _table(kept, totals if isinstance(totals, dict) else {}, strings)
    return Decoded(tables={table.kind: table}, records=len(events), undecoded=cut + len(events) - len(kept))


def _table(events: AnyArray, totals: Mapping[str, Any], strings: StringTable) -> Table:
    allocated = np.full(len(events), UNKNOWN, np.int64)
    reserved = allocated.copy()
    sizes = events["bytes"].astype(np.int64)
    for device in unique_values(events["device"]).tolist():
        rows = np.flatnonzero(events["device"] == device)
        held, kept = _final(totals.get(str(device)))
        action = events["action"][rows]
        allocated[rows] = _running(held, _deltas(action, sizes[rows], MEMORY_ALLOCATED, MEMORY_FREED))
        reserved[rows] = _running(kept, _deltas(action, sizes[rows], MEMORY_RESERVED, MEMORY_RELEASED))
    shown = np.isin(events["action"], (MEMORY_ALLOCATED, MEMORY_FREED, MEMORY_OUT_OF_MEMORY))
    rows = np.flatnonzero(shown)
    action = events["action"][rows]
    names = strings.add_all([NAME, OUT_OF_MEMORY_NAME]) if len(rows) else np.zeros(2, np.int32)
    columns = {
        "start": events["time"][rows],
        "name": np.where(action == MEMORY_OUT_OF_MEMORY, names[1], names[0]),
        "bytes": np.where(action == MEMORY_FREED, -sizes[rows], sizes[rows]),
        "address": events["address"][rows],
        "total_allocated": allocated[rows],
        "total_reserved": reserved[rows],
        "device_type": np.full(len(rows), CUDA),
        "device": events["device"][rows],
    }
    return make_table("cpu_instant_event", len(rows), columns)


def _final(value: Any) -> tuple[int, int]:
    """Returns what a device held at the end, as far as the source states it."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int) and 0 <= each < 1 << 62 for each in value)
    ):
        return value[0], value[1]
    return UNKNOWN, UNKNOWN


def _deltas(action: AnyArray, sizes: Ints, more: int, less: int) -> Ints:
    deltas: Ints = np.where(action == more, sizes, np.where(action == less, -sizes, 0))
    return deltas


def _running(final: int, deltas: Ints) -> Ints:
    """Returns the total after each action; UNKNOWN if the final total is unknown or the source contradicts itself."""
    if final == UNKNOWN:
        return np.full(len(deltas), UNKNOWN, np.int64)
    following = deltas[::-1].cumsum()[::-1] - deltas
    totals: Ints = np.maximum(final - following, UNKNOWN)
    return totals
