"""The column model of a trace: one table of plain numpy arrays per kind of activity.

Theory of operation
    Times are Unix nanoseconds and durations nanoseconds, both int64. Names are numbers (int32) into
    `Trace.strings`. Ids keep the width that the vendor gives them. The rows of a table are in no
    particular order. Tables are values: nothing changes an array after the table was made.

    SCHEMAS says for every table which columns it has, their types and what they mean. The names of the
    tables are Kineto's categories; op_tensor alone is none: its rows have no time, they belong to ops.

    A trace that was read from somebody's file has the same tables, with the columns of ORIGIN_COLUMNS beside
    them (Table.origin): what a row was like in the file, so that nothing that came in is lost on the way out.
    Its flows, and whatever has no table of its own, are the tables `flow` and `other`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.model.target_info import TargetInfo

NO_PRIORITY = -(2**31)  # this CUPTI's kernel records do not carry a priority
NO_ROW = -1
UNKNOWN_STREAM = 0xFFFFFFFF  # CUPTI's own value for "no stream"


class Column(NamedTuple):
    """One column of a table."""

    name: str
    dtype: str
    meaning: str


def _columns(*rows: tuple[str, str, str]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)


_TIMED = _columns(
    ("start", "int64", "Unix ns"),
    ("duration", "int64", "ns"),
    ("name", "int32", "number into Trace.strings"),
)
_GPU = _TIMED + _columns(
    ("device", "uint32", "device index as the process sees it"),
    ("context", "uint32", "CUPTI's context id"),
    ("stream", "uint32", "CUPTI's stream id"),
    ("correlation", "uint32", "joins with the runtime or driver call that caused it"),
    ("external_id", "int64", "id of the innermost op or annotation around that call; 0: none"),
)
_QUEUE = _columns(
    ("graph_id", "uint32", "CUDA graph; 0: none"),
    ("graph_node_id", "uint64", "node of the graph; 0: none"),
    ("channel", "uint32", "hardware channel"),
    ("channel_type", "uint32", "0 invalid, 1 compute, 2 copy"),
)
_API = _TIMED + _columns(
    ("thread", "uint32", "system thread id"),
    ("correlation", "uint32", "joins with the GPU activities that the call caused"),
    ("cbid", "uint32", "CUPTI's callback id of the function"),
    ("external_id", "int64", "id of the innermost op or annotation around it; 0: none"),
)
_OP = _TIMED + _columns(
    ("thread", "uint32", "system thread id"),
    ("id", "int64", "id of this op, counted from 1; unique in the trace across both tables of ops"),
    ("sequence", "int64", "autograd's sequence number; -1: none"),
    ("torch_thread", "uint32", "torch's own number of the thread; 0: unknown"),
    ("forward_thread", "uint32", "backward ops: torch's number of the forward op's thread; 0: none"),
    ("scope", "uint8", "at::RecordScope: 0 function, 1 backward function, 7 user"),
    ("finished", "uint8", "0: it was still running when the recording ended"),
    ("inputs", "int32", "number into Trace.strings: its inputs as Kineto's JSON arguments; -1: not recorded"),
)

SCHEMAS: dict[str, tuple[Column, ...]] = {
    "kernel": _GPU
    + _columns(
        ("grid_x", "int32", "blocks"),
        ("grid_y", "int32", "blocks"),
        ("grid_z", "int32", "blocks"),
        ("block_x", "int32", "threads"),
        ("block_y", "int32", "threads"),
        ("block_z", "int32", "threads"),
        ("registers", "uint16", "registers per thread"),
        ("static_shared_memory", "int32", "bytes per block"),
        ("dynamic_shared_memory", "int32", "bytes per block"),
        ("queued", "uint64", "Unix ns when it entered the command buffer; 0: not collected"),
        ("priority", "int32", "launch priority; NO_PRIORITY: not recorded"),
    )
    + _QUEUE,
    "gpu_memcpy": _GPU
    + _columns(
        ("bytes", "uint64", "bytes copied"),
        ("copy_kind", "uint8", "CUPTI's: 1 HtoD, 2 DtoH, 8 DtoD, 10 PtoP, …"),
        ("src_kind", "uint8", "memory: 1 pageable, 2 pinned, 3 device, …"),
        ("dst_kind", "uint8", "memory, likewise"),
        ("peer", "uint8", "1: between two devices, and the four columns below hold"),
        ("src_device", "uint32", "device index"),
        ("src_context", "uint32", "context id"),
        ("dst_device", "uint32", "device index"),
        ("dst_context", "uint32", "context id"),
    )
    + _QUEUE,
    "gpu_memset": _GPU
    + _columns(
        ("bytes", "uint64", "bytes set"),
        ("memory_kind", "uint16", "memory: 1 pageable, 2 pinned, 3 device, …"),
    )
    + _QUEUE,
    "cuda_runtime": _API,
    "cuda_driver": _API,
    "cuda_sync": _TIMED
    + _columns(
        ("type", "uint32", "1 event, 2 stream waits for event, 3 stream, 4 context"),
        ("device", "int32", "device of the context; -1: no other record names that context"),
        ("context", "uint32", "context id"),
        ("stream", "uint32", "stream id; UNKNOWN_STREAM: none"),
        ("correlation", "uint32", "joins with the runtime call"),
        ("event", "uint32", "CUDA event id (types 1 and 2)"),
        ("wait_on_stream", "int64", "stream in which that event was last recorded; -1: unknown"),
        ("wait_on_correlation", "int64", "correlation of that record call; -1: unknown"),
    ),
    "cpu_op": _OP,
    "user_annotation": _OP,
    "op_tensor": _columns(
        ("op", "int64", "id of the op whose input it is"),
        ("position", "uint32", "among the tensors of the op's inputs, from 0"),
        ("impl", "uint64", "address of the TensorImpl"),
        ("storage", "uint64", "address of the storage's data; 0: none"),
    ),
    "gpu_user_annotation": _TIMED
    + _columns(
        ("device", "uint32", "device index"),
        ("stream", "uint32", "CUPTI's stream id"),
        ("external_id", "int64", "id of the user_annotation"),
    ),
    "cpu_instant_event": _TIMED
    + _columns(
        ("thread", "uint32", "system thread id; 0: unknown"),
        ("bytes", "int64", "allocated; negative: freed"),
        ("address", "uint64", "of the block"),
        ("total_allocated", "int64", "bytes on the device after this event; -1: unknown"),
        ("total_reserved", "int64", "bytes on the device after this event; -1: unknown"),
        ("device_type", "int32", "0 CPU, 1 CUDA"),
        ("device", "int32", "device index; -1: CPU"),
        ("external_id", "int64", "id of the innermost op or annotation at that time; 0: none"),
    ),
    "overhead": _TIMED + _columns(("kind", "uint32", "CUPTI's overhead kind")),
    "flow": _TIMED
    + _columns(
        ("thread", "uint32", "thread of this end, like those of the calls; GPU rows: number of the stream"),
        ("category", "int32", "number into Trace.strings: ac2g, fwdbwd, …"),
        ("phase", "uint8", "as ASCII: s start, t step, f end"),
        ("id", "int64", "id that both ends share"),
    ),
    "other": _TIMED
    + _columns(
        ("thread", "uint32", "likewise"),
        ("category", "int32", "number into Trace.strings; -1: none"),
        ("phase", "uint8", "as ASCII: X complete, i instant, C counter, M metadata, …"),
    ),
    "python_function": _TIMED
    + _columns(
        ("thread", "uint32", "system thread id"),
        ("depth", "int32", "0: outermost frame"),
        ("parent", "int32", "row of the calling frame's slice; NO_ROW: none"),
        ("samples", "int32", "samples in which this slice was on the stack"),
        ("self_samples", "int32", "samples in which it was the innermost frame"),
        ("running", "int32", "self samples in which the thread was on a CPU most of the time since its last sample"),
        ("waiting", "int32", "self samples in which the thread waited for the GIL"),
        ("idle", "int32", "self samples in which the thread did not run for another reason: it slept or waited"),
        ("line", "int32", "line that was executing in most of its samples; 0: unknown"),
        ("lines", "int32", "number into Trace.strings: its self samples by line and state, as text; -1: unknown"),
        ("module", "int32", "rows of nn.Module calls: the module's number; -1: a plain function"),
    ),
}
GPU_TABLES = ("kernel", "gpu_memcpy", "gpu_memset")
API_TABLES = ("cuda_runtime", "cuda_driver")
OP_TABLES = ("cpu_op", "user_annotation")
UNTIMED_TABLES = ("op_tensor",)
FILE_TABLES = ("flow", "other")  # only in traces that were read from a file

# Of every table of a trace that was read from a Chrome trace. formats/chrome/chrome_reader.py says which arguments of
# each kind have a column (in the schema or, where it says so, here) and which bit of `present` is whose.
ORIGIN_COLUMNS = _columns(
    ("pid", "int64", "as in the file; a text: TEXT_ID less its number in Trace.strings"),
    ("tid", "int64", "likewise"),
    ("category", "int32", "number into Trace.strings: the category as the file spells it; -1: none"),
    ("present", "uint64", "bit n: the row had the n-th member of its kind, and its column has the very value"),
    ("args", "int32", "number into Trace.strings: its other arguments as JSON members; -1: none"),
    ("members", "int32", "likewise its other members beside the arguments; -1: none"),
    ("place", "uint32", "number of the event in the file, from 0 on: HTA's figures need the order over all tables"),
)
TEXT_ID = -(2**62)
NO_SEQUENCE = -1
NO_STRING = -1
NO_MODULE = -1


class LazyColumns(Mapping[str, npt.NDArray[Any]]):
    """Columns that are read at the first access; each has `rows` values of its type in the schema."""

    def __init__(self, names: Sequence[str], rows: int, read: Callable[[str], npt.NDArray[Any]]) -> None:
        self.rows = rows
        self._names = dict.fromkeys(names)
        self._read = read
        self._have: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        found = self._have.get(name)
        if found is None:
            if name not in self._names:
                raise KeyError(name)
            found = self._have[name] = self._read(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class Table:
    """The activities of one kind. `columns` has exactly the columns of SCHEMAS[kind], all of one length.

    origin: empty, or at least ORIGIN_COLUMNS, with the same length.
    """

    kind: str
    columns: Mapping[str, npt.NDArray[Any]]
    origin: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema = SCHEMAS[self.kind]
        if list(self.columns) != [column.name for column in schema]:
            raise ValueError(f"{self.kind}: columns {list(self.columns)} do not follow the schema")
        if isinstance(self.columns, LazyColumns):
            return  # what reads them looks at them
        for column in schema:
            array = self.columns[column.name]
            if array.dtype != column.dtype or len(array) != len(self):
                raise ValueError(f"{self.kind}.{column.name}: {array.dtype} of {len(array)} rows, not {column.dtype}")
        for name, array in self.origin.items():
            if len(array) != len(self):
                raise ValueError(f"{self.kind}: origin column {name} has {len(array)} rows, not {len(self)}")

    def __len__(self) -> int:
        if isinstance(self.columns, LazyColumns):
            return self.columns.rows
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    def end(self) -> npt.NDArray[np.int64]:
        """Returns the ends in Unix ns."""
        end: npt.NDArray[np.int64] = self["start"] + self["duration"]
        return end

    def take(self, rows: npt.NDArray[Any]) -> "Table":
        """Returns the rows at these places, or under this mask."""
        if isinstance(self.columns, LazyColumns):
            count = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
            return Table(self.kind, *(_taken(part, rows, count) for part in (self.columns, self.origin)))
        columns, origin = ({name: array[rows] for name, array in part.items()} for part in (self.columns, self.origin))
        return Table(self.kind, columns, origin)


def _taken(part: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any], count: int) -> LazyColumns:
    return LazyColumns(list(part), count, lambda name: part[name][rows])


def make_table(
    kind: str,
    length: int,
    columns: Mapping[str, npt.NDArray[Any]],
    origin: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Table:
    """Makes a table from some columns; the others are zero, or hold the value that means none."""
    full = {}
    for column in SCHEMAS[kind]:
        array = columns.get(column.name)
        if array is None:
            array = np.full(length, NO_STRING if column.name == "lines" else 0)
        full[column.name] = array.astype(column.dtype, copy=False)
    return Table(kind, full, origin or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The numbers of records that are missing in the tables, by reason."""

    dropped: int = 0  # lost in the target: the buffers were full
    undecoded: int = 0  # came to the daemon, but could not be read
    torn: int = 0  # cut off when the daemon died
    out_of_window: int = 0  # outside the wanted window


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One process during one window.

    Device properties are Kineto's `deviceProperties` items, as the target provided them.
    """

    target: TargetInfo
    strings: Sequence[str]
    tables: Mapping[str, Table]
    window_start_ns: int
    window_end_ns: int
    devices: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, int] = field(default_factory=dict)  # cupti_version, cuda_runtime_version, …
    losses: Losses = Losses()
    sample_period_ns: int = 0  # of python_function; 0: no samples, or exact calls
    head: Mapping[str, str] | None = None  # of a file: its members beside traceEvents, each as JSON text
    notes: Sequence[str] = ()  # of a file: what was lost or unusual when it was read

    def table(self, kind: str) -> Table:
        """Returns the table of this kind, which may be empty."""
        found = self.tables.get(kind)
        return make_table(kind, 0, {}) if found is None else found


class StringTable:
    """Collects the strings of a trace as text -> number."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Returns the number of this text."""
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.strings)
            self.strings.append(text)
        return number

    def add_all(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """Returns the number of each text."""
        return np.array([self.add(text) for text in texts], np.int32)
