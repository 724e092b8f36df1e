"""The rows on which viewers show activities, and the texts of launch shapes there.

GPU activities go to their stream's row, as in Kineto's traces. Viewers drop or misplace events of one row that
partially overlap (as kernels of one stream do with programmatic dependent launch), so the second one of such a pair
goes to another row of the same stream. Activities never nest inside each other; an annotation encloses whole
activities, or goes to another row. Synchronizations have rows of their own, since they span kernels.

Ready-made texts for the launch shapes of kernels.

A training step launches the same few hundred shapes over and over. Grid, block, registers, shared memory and all the
occupancy figures depend on the shape alone, so their text is made once per shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kineto_trace.arrays.codec import Events, Interner, PreparedTexts, lanes
from kineto_trace.base.array_types import AnyArray, Ints, UInts32
from kineto_trace.formats.perfetto_proto import nest_lanes
from kineto_trace.kernel_traits.occupancy import Occupancy, Shapes, is_supported, occupancy
from kineto_trace.model.activity_tables import ViewerRow, tables_on
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES, UNKNOWN_STREAM, Table, own_tables

SYNC_OFFSET = 1_000_000  # added to a stream's row for its synchronizations, as in Kineto
LANE_OFFSET = 2_000_000  # added for each further row of a stream
LANE_LIMIT = 16
ANNOTATIONS = "gpu_user_annotation"
# If activities have the same interval, those of the earlier table enclose the others.
NESTING = (
    *tables_on(ViewerRow.PYTHON),
    *reversed(OP_TABLES),
    *tables_on(
        ViewerRow.CALL, ViewerRow.MEMORY, ViewerRow.ANNOTATION, ViewerRow.GPU, ViewerRow.SYNC, ViewerRow.OVERHEAD
    ),
)
Rows = Ints
_COLUMNS = (
    *(f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"),
    "static_shared_memory",
    "dynamic_shared_memory",
    "registers",
    "device",
)
_CACHED_SHAPES = 50_000  # at this size the cache is cleared, so that it does not grow with the trace
_Shape = tuple[int, ...]  # the values of _COLUMNS


class LaunchShapes:
    """Texts by shape. devices: Kineto's deviceProperties items."""

    def __init__(self, devices: Sequence[Mapping[str, Any]]) -> None:
        self._devices = {device["id"]: device for device in devices if is_supported(device)}
        self._texts: dict[_Shape, bytes] = {}

    def texts(self, kernels: Mapping[str, AnyArray]) -> tuple[UInts32, PreparedTexts]:
        """Returns a text number for each kernel, and the arguments ',"registers per thread":…' for each number."""
        numbers, shapes = _distinct(kernels)
        missing = [shape for shape in shapes if shape not in self._texts]
        if len(self._texts) + len(missing) > _CACHED_SHAPES:
            self._texts.clear()
            missing = shapes
        self._texts.update(self._render(missing))
        return numbers, PreparedTexts([self._texts[shape] for shape in shapes])

    def _render(self, shapes: Sequence[_Shape]) -> dict[_Shape, bytes]:
        rendered: dict[_Shape, bytes] = {}
        by_device: dict[int, list[_Shape]] = {}
        for shape in shapes:
            by_device.setdefault(shape[-1], []).append(shape)
        for device, group in by_device.items():
            figures = occupancy(self._devices[device], _as_shapes(group)) if device in self._devices else None
            for row, shape in enumerate(group):
                rendered[shape] = _text(shape, figures, row)
        return rendered


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
    row, start, end = sync_base_rows(sync), sync["start"], sync.end()
    track = Interner().intern((sync["device"].astype(np.int64) << 32 ^ row & 0xFFFFFFFF).astype(np.uint64))
    order = np.lexsort((start, track))
    row[order] += lanes(track[order], start[order], end[order], LANE_LIMIT) * np.int64(LANE_OFFSET)
    return row


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


def _distinct(kernels: Mapping[str, AnyArray]) -> tuple[UInts32, list[_Shape]]:
    """Returns a shape number for each kernel, and the distinct shapes.

    The result is exact: pairs of 32-bit values are numbered, then pairs of those numbers, until one number is left.
    """
    columns = [kernels[name].astype(np.uint32) for name in _COLUMNS]
    while len(columns) > 1:
        pairs = [
            Interner().intern(high.astype(np.uint64) << np.uint64(32) | low)
            for high, low in zip(columns[::2], columns[1::2], strict=False)
        ]
        columns = pairs + columns[len(pairs) * 2 :]
    numbers = columns[0]
    first = np.zeros(int(numbers.max(initial=0)) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    values = np.stack([kernels[name][first].astype(np.int64) for name in _COLUMNS], axis=1)
    return numbers, [tuple(row) for row in values.tolist()]


def _as_shapes(group: Sequence[_Shape]) -> Shapes:
    values = np.array(group, np.int64).clip(0, 2**31 - 1)
    return Shapes(
        blocks=values[:, 0] * values[:, 1] * values[:, 2],
        threads=values[:, 3] * values[:, 4] * values[:, 5],
        static_shared_memory=values[:, 6],
        dynamic_shared_memory=values[:, 7],
        registers=values[:, 8],
    )


def _text(shape: _Shape, figures: Occupancy | None, row: int) -> bytes:
    grid_x, grid_y, grid_z, block_x, block_y, block_z, static, dynamic, registers, _ = shape
    parts = [f',"registers per thread":{registers},"shared memory":{static + dynamic}']
    if figures is not None:
        parts.append(
            f',"blocks per SM":{figures.blocks_per_sm[row]:.6f},"warps per SM":{figures.warps_per_sm[row]:.6f}'
        )
    parts.append(f',"grid":[{grid_x},{grid_y},{grid_z}],"block":[{block_x},{block_y},{block_z}]')
    if figures is not None:
        parts.append(f',"est. achieved occupancy %":{figures.percent[row]},"occupancy":{{{_details(figures, row)}}}')
    return "".join(parts).encode()


def _details(figures: Occupancy, row: int) -> str:
    values = {
        "activeBlocksPerMultiprocessor": figures.active_blocks,
        "limitingFactors": figures.limiting_factors,
        "blockLimitRegs": figures.limit_registers,
        "blockLimitSharedMem": figures.limit_shared_memory,
        "blockLimitWarps": figures.limit_warps,
        "blockLimitBlocks": figures.limit_blocks,
        "blockLimitBarriers": figures.limit_barriers,
        "allocatedRegistersPerBlock": figures.allocated_registers,
        "allocatedSharedMemPerBlock": figures.allocated_shared_memory,
    }
    return ",".join(f'"{name}":{column[row]}' for name, column in values.items())
