"""Decides on which row (process, thread) of a trace viewer each activity goes.

GPU activities go to their stream's row, as in Kineto's traces. Viewers drop or misplace events of one row that
partially overlap (as kernels of one stream do with programmatic dependent launch), so the second one of such a pair
goes to another row of the same stream. Activities never nest inside each other; an annotation encloses whole
activities, or goes to another row. Synchronizations have rows of their own, since they span kernels.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Events, Interner, lanes
from kineto_trace.formats.shared.native_packets import nest_lanes
from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.activity_tables import tables_on
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES, UNKNOWN_STREAM, Table, own_tables

SYNC_OFFSET = 1_000_000  # added to a stream's row for its synchronizations, as in Kineto
LANE_OFFSET = 2_000_000  # added for each further row of a stream
LANE_LIMIT = 16
ANNOTATIONS = "gpu_user_annotation"
# Of activities with the same interval, those of the earlier table enclose the others.
NESTING = (
    *tables_on(ViewerRow.PYTHON),
    *reversed(OP_TABLES),
    *tables_on(
        ViewerRow.CALL, ViewerRow.MEMORY, ViewerRow.ANNOTATION, ViewerRow.GPU, ViewerRow.SYNC, ViewerRow.OVERHEAD
    ),
)

Rows = npt.NDArray[np.int64]


def gpu_rows(tables: Mapping[str, Table], *, margin_ns: int = 0) -> dict[str, Rows]:
    """Returns the row number of every activity of the GPU tables and of the annotations on GPUs.

    margin_ns: how far annotations extend beyond their interval on both sides.
    """
    kinds = [kind for kind in (ANNOTATIONS, *GPU_TABLES, *own_tables(tables, ViewerRow.GPU)) if kind in tables]
    present = [tables[kind] for kind in kinds if len(tables[kind])]
    rows = {kind: np.empty(0, np.int64) for kind in kinds}
    if not present:
        return rows
    sizes = [len(table) for table in present]
    row = np.concatenate([base_rows(table) for table in present])
    device = np.concatenate([table["device"].astype(np.int64) for table in present])
    margins = [margin_ns * (table.kind == ANNOTATIONS) for table in present]
    start = np.concatenate([table["start"] - margin for table, margin in zip(present, margins, strict=True)])
    end = np.concatenate([table.end() + margin for table, margin in zip(present, margins, strict=True)])
    leaf = np.repeat(np.array([table.kind != ANNOTATIONS for table in present], np.uint8), sizes)
    track = Interner().intern((device << 32 ^ row & 0xFFFFFFFF).astype(np.uint64))
    order = Events(track, start, end, leaf).order()
    lane = nest_lanes(track[order], start[order], end[order], leaf[order], LANE_LIMIT).lane
    row[order] += lane.astype(np.int64) * LANE_OFFSET
    return {**rows, **dict(zip((table.kind for table in present), np.split(row, np.cumsum(sizes)[:-1]), strict=True))}


def sync_rows(sync: Table) -> Rows:
    """Returns the row number of every synchronization; -1 is the device's own row."""
    return _with_lanes({sync.kind: sync}, {sync.kind: sync_base_rows(sync)})[sync.kind]


def sync_base_rows(sync: Table) -> Rows:
    """Returns the row numbers of synchronizations without regard to overlaps."""
    return np.where(sync["stream"] == UNKNOWN_STREAM, -1, base_rows(sync) + SYNC_OFFSET)


def row_name(device: int, row: int) -> str:
    """Returns the name that the viewer shows for a row of a GPU."""
    lane, base = divmod(row + 1, LANE_OFFSET)
    base -= 1
    suffix = f"(overlap {lane})" if lane else ""
    if base == -1:
        return f"Device {device} {suffix}".rstrip()
    if base >= SYNC_OFFSET:
        return f"stream {base - SYNC_OFFSET} (sync){suffix}"
    return f"stream {base} {suffix}"


def base_rows(table: Table) -> Rows:
    """Returns the row of each activity's stream, without regard to overlaps."""
    streams: Rows = np.minimum(table["stream"], SYNC_OFFSET - 1).astype(np.int64)
    return streams


def _with_lanes(tables: Mapping[str, Table], base: Mapping[str, Rows]) -> dict[str, Rows]:
    """Adds LANE_OFFSET to the row numbers of activities that overlap an earlier activity on their row."""
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
