"""Decodes raw CUPTI records ("cupti/1") into columns.

Theory of operation
    The byte layout of the fields depends on the CUPTI version: LAYOUTS has it for every version that we know, and any
    other version is refused. The plans below map fields to columns; the native codec applies them to all buffers. Whole
    columns are then processed: names replace numbers, and records outside the window are dropped.

    Nothing is guessed. A version that is not in the table raises an error, as does a record size seen by the collector
    that differs from the table's. If a buffer cannot be read to its end (an unknown kind, a truncated record), its rest
    is lost and counted; if no buffer yields a single record, that is an error too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from kineto_agent.protocol.records import CUPTI_FORMAT, SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API

from kineto_trace.arrays import codec
from kineto_trace.arrays.codec import ColumnPlan, Interner, KindPlan
from kineto_trace.arrays.id_sets import distinct, lookup
from kineto_trace.base.array_types import AnyArray, Ints, Ints32, UInts64
from kineto_trace.base.quantities import times
from kineto_trace.decode import activity_names
from kineto_trace.decode.cupti_layouts import LAYOUTS, WIDTHS, RecordLayout, VersionLayout
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.errors import UnknownLayoutError, UnknownVersionError
from kineto_trace.model.activity_tables import NO_PRIORITY
from kineto_trace.model.trace import GPU_TABLES, SCHEMAS, StringTable, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = CUPTI_FORMAT
MIN_RECORD_BYTES = 8  # a smaller record could not be distinguished from its neighbours
_LEAST_APART_NS = 1_000_000  # a sample is accurate to some 30 ns
_READINGS = 3  # in each sample: Unix ns, counter, monotonic ns


class RecordKind(NamedTuple):
    """One known CUPTI activity kind: its layout, and its table ("": none).

    fields: column of the table -> the vendor's field; all timed records also have start and duration.
    missing: values of columns for which this layout, or that of some versions, has no field.
    named_by: columns whose values, combined as the bytes of one number, determine the name; kernels and API calls get
        their names elsewhere.
    """

    kind: int
    layout: str
    table: str = ""
    fields: Mapping[str, str] = {}
    missing: Mapping[str, int] = {}
    named_by: tuple[str, ...] = ()
    name_of: Callable[[int], str] = str


_GPU = {"device": "deviceId", "context": "contextId", "stream": "streamId", "correlation": "correlationId"}
_QUEUE = {"graph_id": "graphId", "graph_node_id": "graphNodeId", "channel": "channelID", "channel_type": "channelType"}
_COPY = _GPU | {"bytes": "bytes", "copy_kind": "copyKind", "src_kind": "srcKind", "dst_kind": "dstKind"} | _QUEUE
_PEER = {
    "src_device": "srcDeviceId",
    "src_context": "srcContextId",
    "dst_device": "dstDeviceId",
    "dst_context": "dstContextId",
}
_COPY_NAMED_BY = ("copy_kind", "src_kind", "dst_kind")
_KERNEL = (
    _GPU
    | {f"{what}_{axis}": f"{what}{axis.upper()}" for what in ("grid", "block") for axis in "xyz"}
    | {
        "registers": "registersPerThread",
        "static_shared_memory": "staticSharedMemory",
        "dynamic_shared_memory": "dynamicSharedMemory",
        "queued": "queued",
        "priority": "priority",
    }
    | _QUEUE
)
_API = {"thread": "threadId", "correlation": "correlationId", "cbid": "cbid"}
_EVENT = {"context": "contextId", "event": "eventId", "stream": "streamId", "correlation": "correlationId"}
_SYNC = {
    "type": "type",
    "context": "contextId",
    "stream": "streamId",
    "correlation": "correlationId",
    "event": "cudaEventId",
}


def _copy_name(key: int) -> str:
    return activity_names.memcpy_name(key >> 16, key >> 8 & 255, key & 255)


KINDS = (
    RecordKind(1, "MEMCPY", "gpu_memcpy", _COPY, {}, _COPY_NAMED_BY, _copy_name),
    RecordKind(
        2,
        "MEMSET",
        "gpu_memset",
        _GPU | {"bytes": "bytes", "memory_kind": "memoryKind"} | _QUEUE,
        named_by=("memory_kind",),
        name_of=activity_names.memset_name,
    ),
    RecordKind(3, "KERNEL", "kernel", _KERNEL, {"priority": NO_PRIORITY}),
    RecordKind(4, "API", "cuda_driver", _API),
    RecordKind(5, "API", "cuda_runtime", _API),
    RecordKind(10, "KERNEL", "kernel", _KERNEL, {"priority": NO_PRIORITY}),
    RecordKind(17, "OVERHEAD", "overhead", {"kind": "overheadKind"}, {}, ("kind",), activity_names.overhead_name),
    RecordKind(22, "MEMCPY2", "gpu_memcpy", _COPY | _PEER, {"peer": 1}, _COPY_NAMED_BY, _copy_name),
    RecordKind(36, "CUDA_EVENT", "cuda_event", _EVENT),
    RecordKind(38, "SYNCHRONIZATION", "cuda_sync", _SYNC, {}, ("type",), activity_names.sync_name),
    RecordKind(39, "EXTERNAL_CORRELATION"),
)
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}

Columns = dict[str, AnyArray]


def kinds_of(layout: VersionLayout) -> list[RecordKind]:
    """Returns the kinds that a version has."""
    return [known for known in KINDS if known.layout in layout.records]


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source; names go into `strings`. Raises UnknownVersionError, UnknownLayoutError."""
    version = version_of(source)
    layout = LAYOUTS[version]
    _check_sizes(source, layout, version)
    buffers = Buffers(source, layout)
    records, undecoded, warnings = buffers.read()
    if undecoded and not records:
        raise UnknownLayoutError(f"none of the records of CUPTI {version} could be decoded: {'; '.join(warnings)}")
    parts: dict[str, list[Columns]] = {}
    clocks = clocks_of(source.metadata.get("clocks"))
    for known in kinds_of(layout):
        if known.table:
            columns = buffers.columns(known)
            if known.table in SCHEMAS:  # events only add to cuda_sync; they have no time and no name
                translate(columns, clocks)
                _name(known, columns, buffers.name_pointers, source, strings)
            parts.setdefault(known.table, []).append(columns)
    joined = {table: _join(pieces) for table, pieces in parts.items()}
    _resolve_sync(joined, joined.pop("cuda_event"))
    tables = {kind: make_table(kind, len(columns["start"]), columns) for kind, columns in joined.items()}
    return Decoded(
        tables=tables, records=records, undecoded=undecoded, warnings=tuple(warnings), metadata=source.metadata
    )


def version_of(source: RawSource) -> int:
    """Returns the version reported by cuptiGetVersion. Raises UnknownVersionError if its layouts are unknown."""
    version = source.metadata.get("cupti_version")
    if not isinstance(version, int) or version not in LAYOUTS:
        known = ", ".join(dict.fromkeys(layout.release for layout in LAYOUTS.values()))
        raise UnknownVersionError(
            f"the target's CUPTI has version {version!r}, which this kinetod does not support (it supports CUDA "
            f"{known}): update kinetod, or use one of these CUDA versions in the target"
        )
    return version


def _check_sizes(source: RawSource, layout: VersionLayout, version: int) -> None:
    for known in kinds_of(layout):
        seen, expected = source.record_bytes.get(known.kind, 0), layout.records[known.layout].size
        if seen and seen != expected:
            raise UnknownLayoutError(
                f"CUPTI {version} wrote {known.layout} records of {seen} bytes, but its headers say {expected}: "
                "not decoded, since every value could be wrong; please report this with the output of `kinetoctl host`"
            )


class Buffers:
    """The arrays that receive the records, and the codec's plans that fill them.

    A first pass counts the records of each kind, so that all arrays fit exactly into one block of memory: touching
    fresh memory costs more than reading every record twice.
    """

    def __init__(self, source: RawSource, layout: VersionLayout) -> None:
        self.name_pointers = Interner()
        self._data = np.frombuffer(source.data, np.uint8) if source.data.nbytes else np.empty(0, np.uint8)
        self._chunks = source.chunks
        kinds = kinds_of(layout)
        sizes = {known.kind: layout.records[known.layout].size for known in kinds}
        unknown = [kind for kind in sorted(source.record_bytes) if kind not in sizes and kind < codec.KIND_LIMIT]
        for kind in unknown[: codec.MAX_KINDS - len(sizes)]:
            if source.record_bytes[kind] >= MIN_RECORD_BYTES:
                sizes[kind] = source.record_bytes[kind]  # recorded but not wanted: skipped
        self._counts = self._count(sizes)
        self._arrays = _allocate(layout, self._counts)
        columns = {known.kind: self._columns_of(known, layout.records[known.layout]) for known in kinds if known.table}
        self._decoder = codec.Decoder(
            [KindPlan(kind, size, self._counts[kind], columns.get(kind, ())) for kind, size in sizes.items()]
        )

    def _count(self, sizes: Mapping[int, int]) -> dict[int, int]:
        counter = codec.Decoder([KindPlan(kind, size, 0, ()) for kind, size in sizes.items()])
        for chunk in self._chunks:
            counter.decode(self._data[chunk.offset : chunk.offset + chunk.size])
        return counter.rows()

    def _columns_of(self, known: RecordKind, layout: RecordLayout) -> list[ColumnPlan]:
        arrays, offsets, widths = self._arrays[known.kind], layout.offsets, WIDTHS[known.layout]
        plans: list[ColumnPlan] = []
        if "start" in offsets:
            start, duration = arrays["start"], arrays["duration"]
            plans.append(ColumnPlan(codec.SPAN, 8, offsets["start"], start, offsets["end"], duration))
        if known.layout == "KERNEL":
            pointers = self.name_pointers
            plans.append(ColumnPlan(codec.INTERN, 8, offsets["name"], arrays["name"], interner=pointers))
        for name, field in known.fields.items():
            if field in offsets:
                plans.append(ColumnPlan(codec.COPY, widths[field], offsets[field], arrays[name]))
        return sorted(plans, key=lambda plan: (plan.operation, plan.width))  # the codec handles equal ones together

    def read(self) -> tuple[int, int, list[str]]:
        """Reads all buffers. Returns the number of records read, the number of unreadable records, and warnings."""
        read = undecoded = 0
        stops: dict[str, int] = {}
        for chunk in self._chunks:
            result = self._decoder.decode(self._data[chunk.offset : chunk.offset + chunk.size])
            read += result.records
            if result.status != codec.OK:
                undecoded += max(1, chunk.records - result.records)
                torn = result.status == codec.TORN
                what = "a truncated record" if torn else f"a record of unknown kind {result.kind}"
                stops[what] = stops.get(what, 0) + 1
        warnings = [f"{times(count, 'buffer')} could not be read past {what}" for what, count in stops.items()]
        return read, undecoded, warnings

    def rewind(self) -> None:
        """Makes the next read() fill the arrays from their beginning again."""
        self._decoder.rewind()

    def columns(self, known: RecordKind) -> Columns:
        """Returns the columns of one kind."""
        rows = self._counts[known.kind]
        columns = dict(self._arrays[known.kind])
        for column in SCHEMAS.get(known.table, ()):
            if column.name in known.missing and column.name not in columns:
                columns[column.name] = np.full(rows, known.missing[column.name], column.dtype)
        if known.layout == "CUDA_EVENT":
            columns["start"] = np.arange(rows, dtype=np.int64)  # the order of recording: these records have no time
        return columns


def _allocate(layout: VersionLayout, rows_of: Mapping[int, int]) -> dict[int, Columns]:
    """Returns uninitialised columns for every record kind, all in one block of memory."""
    wanted = [
        (known.kind, name, np.dtype(dtype), rows_of[known.kind])
        for known in kinds_of(layout)
        if known.table
        for name, dtype in _column_types(known, layout.records[known.layout])
    ]
    block = np.empty(sum(_aligned(dtype.itemsize * rows) for _, _, dtype, rows in wanted), np.uint8)
    arrays: dict[int, Columns] = {}
    at = 0
    for kind, name, dtype, rows in wanted:
        size = dtype.itemsize * rows
        arrays.setdefault(kind, {})[name] = block[at : at + size].view(dtype)
        at += _aligned(size)
    return arrays


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _column_types(known: RecordKind, layout: RecordLayout) -> Iterator[tuple[str, str]]:
    if "start" in layout.offsets:
        yield from (("start", "int64"), ("duration", "int64"))
    if known.layout == "KERNEL":
        yield "name", "uint32"
    for name, field in known.fields.items():
        if field in layout.offsets:
            yield name, _dtype(known.table, name, WIDTHS[known.layout][field])


def _dtype(table: str, column: str, width: int) -> str:
    for known in SCHEMAS.get(table, ()):
        if known.name == column and np.dtype(known.dtype).itemsize == width:
            return known.dtype
    return _UNSIGNED[width]


def _join(pieces: list[Columns]) -> Columns:
    """Joins the columns of two record kinds of one table; a column that one kind lacks is zero there."""
    filled = [piece for piece in pieces if len(piece["start"])] or pieces[-1:]
    if len(filled) == 1:
        return filled[0]
    joined: Columns = {}
    for name in dict.fromkeys(name for piece in filled for name in piece):
        dtype = next(piece[name].dtype for piece in filled if name in piece)
        joined[name] = np.concatenate([piece.get(name, np.zeros(len(piece["start"]), dtype)) for piece in filled])
    return joined


def _name(known: RecordKind, columns: Columns, pointers: Interner, source: RawSource, strings: StringTable) -> None:
    """Fills the name column of one record kind with numbers into `strings`."""
    if known.layout == "KERNEL":
        numbers = strings.add_all(_kernel_names(pointers, source))
        columns["name"] = numbers.take(columns["name"])
    elif known.layout == "API":
        columns["name"] = _named(columns["cbid"], _api_namer(known, source), strings)
    else:
        key = columns[known.named_by[0]] if known.named_by else np.zeros(len(columns["start"]), np.uint32)
        for name in known.named_by[1:]:
            key = key.astype(np.uint32) << 8 | columns[name]
        columns["name"] = _named(key, known.name_of, strings)


_SMALL = 1 << 12


def _named(key: AnyArray, name_of: Callable[[int], str], strings: StringTable) -> Ints32:
    """Returns the number of the name for each key."""
    if len(key) and int(key.max()) < _SMALL:  # callback ids: a table look-up instead of a search
        values = np.flatnonzero(np.bincount(key, minlength=1))
        number_of = np.zeros(_SMALL, np.int32)
        number_of[values] = strings.add_all([name_of(value) for value in values.tolist()])
        return number_of.take(key)
    found, numbers = np.unique(key, return_inverse=True)
    return strings.add_all([name_of(value) for value in found.tolist()])[numbers]


def _kernel_names(pointers: Interner, source: RawSource) -> list[str]:
    table = source.strings.get(SPACE_KERNEL_NAME, {})
    return [
        activity_names.demangle(table[key]) if key in table else f"kernel with unknown name at {key:#x}"
        for key in pointers.keys().tolist()
    ]


def _api_namer(known: RecordKind, source: RawSource) -> Callable[[int], str]:
    driver = known.table == "cuda_driver"
    table = source.strings.get(SPACE_DRIVER_API if driver else SPACE_RUNTIME_API, {})
    return lambda cbid: activity_names.api_name(table, cbid, "driver" if driver else "runtime")


def _resolve_sync(tables: dict[str, Columns], events: Columns) -> None:
    """Finds the device and the recorded event of each synchronization; drops waits on streams without work.

    Kineto drops those too: libraries make thousands of them on streams that never run anything.
    """
    sync, work = tables["cuda_sync"], [tables[kind] for kind in GPU_TABLES if kind in tables]
    if len(sync["type"]):
        streams = np.concatenate([distinct(_pair(part["context"], part["stream"])) for part in work])
        idle = ~np.isin(_pair(sync["context"], sync["stream"]), streams)
        wait = (sync["type"] == activity_names.STREAM_WAIT_EVENT) & idle
        sync = tables["cuda_sync"] = {name: column[~wait] for name, column in sync.items()}
    owners = np.concatenate([distinct(_pair(part["context"], part["device"])) for part in work])
    device = (owners & np.uint64(0xFFFFFFFF)).astype(np.int64)
    sync["device"] = lookup(sync["context"].astype(np.uint64), owners >> np.uint64(32), device, -1)
    recorded, wanted = _pair(events["context"], events["event"]), _pair(sync["context"], sync["event"])
    for name, column in (("wait_on_stream", "stream"), ("wait_on_correlation", "correlation")):
        sync[name] = lookup(wanted, recorded, events[column].astype(np.int64), -1)


def _pair(high: AnyArray, low: AnyArray) -> UInts64:
    pair: UInts64 = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return pair


# Converts the times of CUPTI's records from any of their clocks to Unix time.
#
# CUPTI's own times are Unix ns. In a process that has used torch's profiler they are readings of the processor's time
# stamp counter or of CLOCK_MONOTONIC (agent/native/kit/clock_samples.c). The source provides two samples of all
# clocks, from the beginning and the end of the recording: the records use the clock whose samples are nearest to
# their times, and a straight line through its samples converts them. All records of one kind use the same clock.
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


def translate(columns: dict[str, AnyArray], clocks: Sequence[CuptiClock]) -> bool:
    """Converts the times in these columns to Unix ns. Returns False if they are already, or their clock is unknown."""
    known = columns["start"][columns["start"] > 0]
    if not len(known) or not clocks:
        return False
    middle = int(np.median(known))
    clock = min(clocks, key=lambda clock: clock.distance(middle))
    if clock is clocks[0]:
        return False
    columns["start"] = clock.to_unix(columns["start"])
    columns["duration"] = clock.length_ns(columns["duration"])
    if "queued" in columns:
        columns["queued"] = clock.to_unix(columns["queued"].astype(np.int64)).astype(columns["queued"].dtype)
    return True
