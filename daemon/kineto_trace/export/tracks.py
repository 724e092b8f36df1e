"""On which row (process, thread) of a trace viewer each activity goes.

GPU activities go to their stream's row, as in Kineto's traces. Viewers drop or misplace events of one row
that overlap (kernels of one stream do with programmatic dependent launch): the second one of such a pair
goes to another row of the same stream. Synchronizations have rows of their own, since they span kernels.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kineto_trace.codec import Events, Interner, lanes
from kineto_trace.model import GPU_TABLES, UNKNOWN_STREAM, Table

SYNC_OFFSET = 1_000_000  # Kineto's row number of a stream's synchronizations
LANE_OFFSET = 2_000_000  # further rows of a stream
LANE_LIMIT = 16

Rows = npt.NDArray[np.int64]


def gpu_rows(tables: Mapping[str, Table]) -> dict[str, Rows]:
    """The row number of every activity of the GPU tables."""
    kinds = [kind for kind in GPU_TABLES if kind in tables]
    return _with_lanes({kind: tables[kind] for kind in kinds}, {kind: _stream(tables[kind]) for kind in kinds})


def sync_rows(sync: Table) -> Rows:
    """The row number of every synchronization; -1 is the device's own row."""
    streams = _stream(sync)
    base = np.where(sync["stream"] == UNKNOWN_STREAM, -1, streams + SYNC_OFFSET)
    return _with_lanes({sync.kind: sync}, {sync.kind: base})[sync.kind]


def annotation_rows(annotations: Table) -> Rows:
    """The row number of every annotation on a GPU: its stream's, unless it overlaps another one without nesting."""
    streams = _stream(annotations)
    track = Interner().intern((annotations["device"].astype(np.uint64) << np.uint64(32)) | annotations["stream"])
    events = Events(track, annotations["start"], annotations.end())
    order = events.order()
    in_order = events.take(order)
    end = annotations.end()[order]
    cut = np.flatnonzero(in_order.nest(int(end.max(initial=0))).end < end)
    lane = lanes(track[order][cut], annotations["start"][order][cut], end[cut], LANE_LIMIT)
    streams[order[cut]] += (lane.astype(np.int64) + 1) * LANE_OFFSET
    return streams


def row_name(device: int, row: int) -> str:
    """What the viewer shows for a row of a GPU."""
    lane, base = divmod(row + 1, LANE_OFFSET)
    base -= 1
    suffix = f"(overlap {lane})" if lane else ""
    if base == -1:
        return f"Device {device} {suffix}".rstrip()
    if base >= SYNC_OFFSET:
        return f"stream {base - SYNC_OFFSET} (sync){suffix}"
    return f"stream {base} {suffix}"


def _stream(table: Table) -> Rows:
    streams: Rows = np.minimum(table["stream"], SYNC_OFFSET - 1).astype(np.int64)
    return streams


def _with_lanes(tables: Mapping[str, Table], base: Mapping[str, Rows]) -> dict[str, Rows]:
    """Adds LANE_OFFSET to the row numbers of activities that overlap an earlier one of their row."""
    if not tables:
        return {}
    device = np.concatenate([table["device"].astype(np.int64) for table in tables.values()])
    row = np.concatenate(list(base.values()))
    start = np.concatenate([table["start"] for table in tables.values()])
    end = np.concatenate([table.end() for table in tables.values()])
    track = Interner().intern((device << 32 ^ row & 0xFFFFFFFF).astype(np.uint64))
    order = np.lexsort((start, track))
    lane = lanes(track[order], start[order], end[order], LANE_LIMIT)
    if lane.any():
        row[order] += lane * np.int64(LANE_OFFSET)
    sizes = np.cumsum([len(table) for table in tables.values()])[:-1]
    return dict(zip(tables, np.split(row, sizes), strict=True))
