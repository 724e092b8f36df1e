"""The events of a Chrome trace for the rows of a capture: GPU work, host work and their arguments.

Each function turns one block of a table's rows into fields for the native writer: the output of Kineto's C++ writer for
one activity, stated once for a whole column. A row may include its flow event.

Also renders the rows of the host: operators, annotations, allocations, Python functions, links.

The arguments have Kineto's names. "Ev Idx" numbers the host's rows: operators and annotations by their ids, then
allocations, then exact Python calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.codec import (
    DECIMAL,
    MICROSECONDS,
    OPTIONAL,
    REAL,
    SIGNED,
    TEXT,
    UNSIGNED,
    Field,
    PreparedTexts,
)
from kineto_trace.base.array_types import AnyArray, Flags
from kineto_trace.collectives.nccl import COLUMN
from kineto_trace.formats.viewer_rows import LaunchShapes
from kineto_trace.model.activity_tables import (
    END_MOVED,
    NO_PRIORITY,
    SAMPLED_ARGUMENTS,
    START_MOVED,
    ActivityTable,
    Column,
    ViewerRow,
    arguments_of,
    numbers_of,
)
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_MODULE, NO_SEQUENCE, Table
from kineto_trace.structure.captured_graphs import CAPTURED_OP

_NUMBERS = {"i": SIGNED, "u": UNSIGNED, "f": REAL}  # operations of fields by kind of dtype
ONE_DEVICE = {"device": "device", "context": "context"}
TWO_DEVICES = {
    "fromDevice": "src_device",
    "inDevice": "device",
    "toDevice": "dst_device",
    "fromContext": "src_context",
    "inContext": "context",
    "toContext": "dst_context",
}
EVENT_TYPES = (1, 2)  # types of cuda_sync that name an event
_FLOW_CALLS = frozenset(
    (
        "cudaLaunchKernel",
        "cudaLaunchCooperativeKernel",
        "cudaLaunchCooperativeKernelMultiDevice",
        "cudaLaunchKernelExC",
        "cudaGraphLaunch",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaStreamWaitEvent",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
    )
)
_UNFINISHED = PreparedTexts([b',"finished":false', b""])  # indexed by the column `finished`
ANNOTATION_MARGIN_NS = 1  # by which Kineto widens an annotation beyond its GPU work on both sides
Fields = list[Field]
Columns = Mapping[str, AnyArray]  # the table's columns, and "tid": the viewer's row
ARGS = b',"args":{'
CLOSE = Field(b"}},\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """The lookup tables and constants that rows refer to."""

    texts: PreparedTexts  # the trace's strings, as names
    arguments: PreparedTexts  # strings that are ready-made arguments (inputs of operators), each with a leading comma
    lines: PreparedTexts  # lines of sampled slices as arguments, each with a leading comma
    callees: PreparedTexts  # callees of sampled Python slices, likewise
    captured: PreparedTexts  # operators that captured CUDA graphs, as arguments, each with a leading comma
    base_ns: int  # Unix ns that all times in the file are relative to
    pid: int
    shapes: LaunchShapes
    categories: Mapping[str, str]  # as in Trace
    own: Mapping[tuple[str, str], PreparedTexts]  # by own table and column, as arguments with a leading comma


Render = Callable[[Columns, FieldNames], Fields]


class RowForm(NamedTuple):
    """A way to write rows of a table. rows: selects the rows that have this form; None for all."""

    render: Render
    rows: Callable[[Columns], Flags] | None = None


def _graph(rows: Columns) -> Fields:
    return numbers(("graph id", rows["graph_id"]), ("graph node id", rows["graph_node_id"]))


def _channel(rows: Columns) -> Fields:
    return numbers(("channel", rows["channel"]), ("channel_type", rows["channel_type"]))


def _kernel(rows: Columns, names: FieldNames) -> Fields:
    """Renders kernels; everything that depends only on the launch shape is one ready-made text."""
    shape, texts = names.shapes.texts(rows)
    head = numbers(
        ("queued", rows["queued"]),
        ("device", rows["device"]),
        ("context", rows["context"]),
        ("stream", rows["stream"]),
        ("correlation", rows["correlation"]),
    )
    priority: Fields = []
    if rows["priority"][0] != NO_PRIORITY:
        priority = [Field(b',"priority":', SIGNED, rows["priority"])]
    return [
        *event("kernel", names, rows, device_pid(rows)),
        *first(head, ARGS),
        Field(b"", TEXT, shape, texts),
        *_graph(rows),
        *priority,
        *_channel(rows),
        *([Field(b"", TEXT, rows[COLUMN], names.arguments)] if COLUMN in rows else []),
        Field(b"", TEXT, rows["hlo"], names.arguments),
        *captured_op(rows, names),
        *external_id(rows),
        CLOSE,
    ]


def _memory(category: str, where: Mapping[str, str], rows: Columns, names: FieldNames) -> Fields:
    """Renders copies and sets. where: the arguments that state the devices, and their columns."""
    bandwidth = rows["bytes"] / np.maximum(rows["duration"], 1)  # bytes per ns: GB/s
    columns = {**where, "stream": "stream", "correlation": "correlation", "bytes": "bytes"}
    head = numbers(*((key, rows[column]) for key, column in columns.items()))
    return [
        *event(category, names, rows, device_pid(rows)),
        *first(head, ARGS),
        Field(b',"memory bandwidth (GB/s)":', DECIMAL, bandwidth),
        *_graph(rows),
        *_channel(rows),
        *captured_op(rows, names),
        *external_id(rows),
        CLOSE,
    ]


def _gpu_work(category: str, rows: Columns, names: FieldNames) -> Fields:
    """Renders GPU work of any table with its numeric arguments."""
    fields = [
        Field(b',"%s":' % key.encode(), _NUMBERS[rows[column].dtype.kind], rows[column])
        for column, key in numbers_of(category).items()
    ]
    return [*event(category, names, rows, device_pid(rows)), *first(fields, ARGS), *external_id(rows), CLOSE]


def _declared(table: ActivityTable, rows: Columns, names: FieldNames) -> Fields:
    """Renders rows of a vendor's own activity type, with its columns as arguments."""
    on_device = table.row is ViewerRow.GPU
    fields = [_argument(table, column, rows[column.name], names) for column in arguments_of(table)]
    pid = device_pid(rows) if on_device else host_pid(names)
    return [*event(table.name, names, rows, pid), *first(fields, ARGS), *external_id(rows), CLOSE]


def _argument(table: ActivityTable, column: Column, values: AnyArray, names: FieldNames) -> Field:
    """Renders one column; the first one of a table, its correlation or device, is a number."""
    if column.text:
        return Field(b"", TEXT, values, names.own[table.name, column.name])
    return Field(b',"%s":' % column.name.encode(), _NUMBERS[values.dtype.kind], values)


def _api(category: str, rows: Columns, names: FieldNames) -> Fields:
    args = first(numbers(("cbid", rows["cbid"]), ("correlation", rows["correlation"])), ARGS)
    return [*event(category, names, rows, host_pid(names)), *args, *external_id(rows), CLOSE]


def _sync(waits: bool, rows: Columns, names: FieldNames) -> Fields:
    """Renders synchronizations; `device` is a device number here. waits: whether the rows wait for an event, which they
    state."""
    wait = [
        Field(b',"wait_on_stream":', SIGNED, rows["wait_on_stream"]),
        Field(b',"wait_on_cuda_event_record_corr_id":', SIGNED, rows["wait_on_correlation"]),
        Field(b',"wait_on_cuda_event_id":', UNSIGNED, rows["event"]),
    ]
    return [
        *event("cuda_sync", names, rows, sync_pid(rows)),
        Field(ARGS + b'"cuda_sync_kind":"', TEXT, rows["name"], names.texts),
        Field(b'"'),
        *(wait if waits else ()),
        Field(b',"stream":', SIGNED, rows["stream"].view(np.int32)),
        *numbers(("correlation", rows["correlation"])),
        Field(b',"device":', SIGNED, rows["device"]),
        *numbers(("context", rows["context"])),
        CLOSE,
    ]


def overhead(rows: Columns, names: FieldNames) -> Fields:
    """Renders CUPTI's own work."""
    return [*event("overhead", names, rows, Field(b"-1")), Field(b"},\n")]


def forms(table: Table) -> tuple[RowForm, ...]:
    """Returns the forms of a table's rows."""
    if table.declared is not None:
        return (RowForm(partial(_declared, table.declared)),)
    return _FORMS.get(table.kind) or (RowForm(partial(_gpu_work, table.kind)),)


def with_flow(table: Table, render: Render) -> Render:
    """Returns a renderer that adds the end of a flow right after each row."""
    kind, own = table.kind, None if table.declared is None else table.declared.row
    at_call = kind in API_TABLES or own is ViewerRow.CALL
    at_work = kind in GPU_TABLES or own is ViewerRow.GPU

    def linked(rows: Columns, names: FieldNames) -> Fields:
        pid = host_pid(names) if at_call else device_pid(rows) if at_work else sync_pid(rows)
        return [*render(rows, names), *flow("s" if at_call else "f", "ac2g", rows["correlation"], names, rows, pid)]

    return linked


def starts_flow(strings: Sequence[str]) -> Flags:
    """Returns for each string whether Kineto begins a flow at calls of this name."""
    plain = [text.removesuffix("_ptsz").removesuffix("_ptds") for text in strings]
    return np.array([name in _FLOW_CALLS or name.startswith(("cudaMemcpy", "cudaMemset")) for name in plain], np.bool_)


def op(category: str, rows: Columns, names: FieldNames) -> Fields:
    """Renders operators, or ranges that the program named."""
    forward = np.where(rows["sequence"] == NO_SEQUENCE, -1, rows["forward_thread"].astype(np.int64))
    return [
        *event(category, names, rows, host_pid(names)),
        Field(ARGS + b'"External id":', SIGNED, rows["id"]),
        Field(b',"Record function id":0'),
        Field(b',"Sequence number":', OPTIONAL, rows["sequence"], base=NO_SEQUENCE),
        Field(b',"Fwd thread id":', OPTIONAL, forward, base=-1),
        Field(b"", TEXT, rows["inputs"], names.arguments),
        Field(b"", TEXT, rows["finished"], _UNFINISHED),
        Field(b',"Ev Idx":', SIGNED, rows["id"] - 1),
        CLOSE,
    ]


def link(phase: str, rows: Columns, names: FieldNames) -> Fields:
    """Renders the beginning ("s") of a link, at the forward operator, or its end ("f"), at the backward operator."""
    return flow(phase, "fwdbwd", rows["link"], names, rows, host_pid(names))


def gpu_user_annotation(rows: Columns, names: FieldNames) -> Fields:
    """Renders annotations around the GPU work that they caused."""
    around = {
        "start": rows["start"] - ANNOTATION_MARGIN_NS,
        "duration": rows["duration"] + 2 * ANNOTATION_MARGIN_NS,
    }
    return [
        *event("gpu_user_annotation", names, {**rows, **around}, device_pid(rows)),
        Field(ARGS + b'"External id":', SIGNED, rows["external_id"]),
        CLOSE,
    ]


def cpu_instant_event(rows: Columns, names: FieldNames) -> Fields:
    """Renders allocations and frees."""
    return [
        Field(b'{"ph":"i","cat":"cpu_instant_event","s":"t","name":"', TEXT, rows["name"], names.texts),
        Field(b'","pid":%d,"tid":' % names.pid, SIGNED, rows["tid"]),
        Field(b',"ts":', MICROSECONDS, rows["start"], base=names.base_ns),
        Field(ARGS + b'"Bytes":', SIGNED, rows["bytes"]),
        Field(b',"Total Reserved":', OPTIONAL, rows["total_reserved"], base=-1),
        Field(b',"Total Allocated":', OPTIONAL, rows["total_allocated"], base=-1),
        Field(b',"Device Id":', SIGNED, rows["device"]),
        Field(b',"Device Type":', SIGNED, rows["device_type"]),
        Field(b',"Addr":', UNSIGNED, rows["address"]),
        Field(b',"finished":false,"Ev Idx":', SIGNED, rows["index"]),
        CLOSE,
    ]


def python_parent(is_root: bool, rows: Columns) -> Field:
    """Returns the caller: null for the outermost calls, otherwise by `parent`, the caller's row in the table."""
    key = b',"Python parent id":'
    return Field(key + b"null") if is_root else Field(key, SIGNED, rows["parent"] + 1)


def python_sampled(is_root: bool, rows: Columns, names: FieldNames) -> Fields:
    """Renders sampled Python frames."""
    return [
        *event("python_function", names, rows, host_pid(names)),
        Field(ARGS + b'"Python id":', SIGNED, rows["row"] + 1),
        python_parent(is_root, rows),
        Field(b',"Python thread":', UNSIGNED, rows["thread"]),
        Field(
            b',"Python module id":', OPTIONAL, np.where(rows["samples"] == 0, rows["module"], NO_MODULE), base=NO_MODULE
        ),
        Field(b',"samples":', SIGNED, rows["samples"]),
        Field(b',"self samples":', SIGNED, rows["self_samples"]),
        Field(b',"running samples":', OPTIONAL, rows["running"]),
        Field(b',"samples waiting for the GIL":', OPTIONAL, rows["waiting"]),
        Field(b',"idle samples":', OPTIONAL, rows["idle"]),
        Field(b',"line":', OPTIONAL, rows["line"]),
        *(Field(b',"%s":' % key.encode(), OPTIONAL, rows[column]) for column, key in SAMPLED_ARGUMENTS.items()),
        Field(b',"%s":' % START_MOVED.encode(), OPTIONAL, rows["start_moved"]),
        Field(b',"%s":' % END_MOVED.encode(), OPTIONAL, rows["end_moved"]),
        Field(b"", TEXT, rows["lines"], names.lines),
        Field(b"", TEXT, rows["callees"], names.callees),
        CLOSE,
    ]


def python_call(is_root: bool, rows: Columns, names: FieldNames) -> Fields:
    """Renders Python calls that a tracer recorded."""
    return [
        *event("python_function", names, rows, host_pid(names)),
        Field(ARGS + b'"Python id":', SIGNED, rows["row"] + 1),
        python_parent(is_root, rows),
        Field(b',"Python thread":', UNSIGNED, rows["thread"]),
        Field(b',"Python module id":', OPTIONAL, rows["module"], base=NO_MODULE),
        Field(b',"Ev Idx":', SIGNED, rows["index"]),
        CLOSE,
    ]


def event(category: str, names: FieldNames, rows: Columns, pid: Field) -> Fields:
    """Returns the beginning of a complete event, up to its duration. category: Kineto's, for GPUs of NVIDIA."""
    own = names.categories.get(category, category)
    return [
        Field(b'{"ph":"X","cat":"%s","name":"' % own.encode(), TEXT, rows["name"], names.texts),
        Field(b'","pid":', pid.operation, pid.column),
        Field(pid.literal + b',"tid":', SIGNED, rows["tid"]),
        Field(b',"ts":', MICROSECONDS, rows["start"], base=names.base_ns),
        Field(b',"dur":', MICROSECONDS, rows["duration"]),
    ]


def flow(phase: str, category: str, ids: AnyArray, names: FieldNames, rows: Columns, pid: Field) -> Fields:
    """Returns the flow event at the start of a row. phase: "s" (start) or "f" (finish)."""
    name = b',"cat":"%s","name":"%s"' % (category.encode(), category.encode())
    end = name + (b',"bp":"e"},\n' if phase == "f" else b"},\n")
    return [
        Field(b'{"ph":"%s","id":' % phase.encode(), UNSIGNED, ids),
        Field(b',"pid":', pid.operation, pid.column),
        Field(pid.literal + b',"tid":', SIGNED, rows["tid"]),
        Field(b',"ts":', MICROSECONDS, rows["start"], base=names.base_ns),
        Field(end),
    ]


def numbers(*pairs: tuple[str, AnyArray]) -> Fields:
    """Returns unsigned arguments; every literal begins with the comma."""
    return [Field(b',"%s":' % name.encode(), UNSIGNED, column) for name, column in pairs]


def first(fields: Fields, before: bytes) -> Fields:
    """Returns the fields with `before` in place of the first comma."""
    return [fields[0]._replace(literal=before + fields[0].literal[1:]), *fields[1:]]


def host_pid(names: FieldNames) -> Field:
    """Returns the pid field of host rows: the traced process."""
    return Field(b"%d" % names.pid)


def device_pid(rows: Columns) -> Field:
    """Returns the pid field of GPU rows: the device number, as Kineto does."""
    return Field(b"", UNSIGNED, rows["device"])


def sync_pid(rows: Columns) -> Field:
    """Returns the pid field of synchronizations, which may be on no device."""
    return Field(b"", SIGNED, rows["device"])


def captured_op(rows: Columns, names: FieldNames) -> Fields:
    """Returns the operator that added a row's work to its CUDA graph, for rows that have one."""
    return [Field(b"", TEXT, rows[CAPTURED_OP], names.captured)] if CAPTURED_OP in rows else []


def external_id(rows: Columns) -> Fields:
    """Returns the id of the op that caused a row, for rows that have one."""
    column = rows["external_id"]
    return [Field(b',"External id":', OPTIONAL, column)] if column.any() else []


# Forms of the tables that _gpu_work cannot write.
_FORMS = {
    "kernel": (RowForm(_kernel),),
    "gpu_memcpy": (
        RowForm(partial(_memory, "gpu_memcpy", ONE_DEVICE), lambda rows: rows["peer"] != 1),
        RowForm(partial(_memory, "gpu_memcpy", TWO_DEVICES), lambda rows: rows["peer"] == 1),
    ),
    "gpu_memset": (RowForm(partial(_memory, "gpu_memset", ONE_DEVICE)),),
    "cuda_sync": (
        RowForm(partial(_sync, True), lambda rows: np.isin(rows["type"], EVENT_TYPES)),
        RowForm(partial(_sync, False), lambda rows: np.isin(rows["type"], EVENT_TYPES, invert=True)),
    ),
    **{kind: (RowForm(partial(_api, kind)),) for kind in API_TABLES},
}
