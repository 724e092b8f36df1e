"""Renders the rows of GPU work and of the calls that cause it in Kineto's Chrome-trace JSON, as literals and columns.

Each function turns one block of a table's rows into fields for the native writer: what Kineto's C++ writer emits for
one activity is stated here once for a whole column. A row may include its flow event.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import DECIMAL, REAL, SIGNED, TEXT, UNSIGNED, Field
from kineto_trace.collectives.collective_arguments import COLUMN
from kineto_trace.formats.chrome.chrome_fields import (
    ARGS,
    CLOSE,
    Columns,
    FieldNames,
    Fields,
    Render,
    captured_op,
    device_pid,
    event,
    external_id,
    first,
    flow,
    host_pid,
    numbers,
)
from kineto_trace.model.activity_table import ActivityTable, Column, ViewerRow, arguments_of
from kineto_trace.model.activity_tables import NO_PRIORITY, numbers_of
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, Table

_NUMBERS = {"i": SIGNED, "u": UNSIGNED, "f": REAL}  # operations of fields by kind of dtype


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


ONE_DEVICE = {"device": "device", "context": "context"}
TWO_DEVICES = {
    "fromDevice": "src_device",
    "inDevice": "device",
    "toDevice": "dst_device",
    "fromContext": "src_context",
    "inContext": "context",
    "toContext": "dst_context",
}


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
    """Renders rows of an activity type of a vendor's own, with its columns as arguments."""
    on_device = table.row is ViewerRow.GPU
    fields = [_argument(table, column, rows[column.name], names) for column in arguments_of(table)]
    pid = device_pid(rows) if on_device else host_pid(names)
    return [*event(table.name, names, rows, pid), *first(fields, ARGS), *external_id(rows), CLOSE]


def _argument(table: ActivityTable, column: Column, values: npt.NDArray[Any], names: FieldNames) -> Field:
    """Renders one column; the first one of a table, its correlation or device, is a number."""
    if column.text:
        return Field(b"", TEXT, values, names.own[table.name, column.name])
    return Field(b',"%s":' % column.name.encode(), _NUMBERS[values.dtype.kind], values)


def _gpu_flow(rows: Columns, names: FieldNames) -> Fields:
    """Renders the end of a flow at a GPU activity."""
    return flow("f", "ac2g", rows["correlation"], names, rows, device_pid(rows))


def _api(category: str, rows: Columns, names: FieldNames) -> Fields:
    args = first(numbers(("cbid", rows["cbid"]), ("correlation", rows["correlation"])), ARGS)
    return [*event(category, names, rows, host_pid(names)), *args, *external_id(rows), CLOSE]


def _api_flow(rows: Columns, names: FieldNames) -> Fields:
    """Renders the beginning of a flow at a call."""
    return flow("s", "ac2g", rows["correlation"], names, rows, host_pid(names))


def _sync(waits: bool, rows: Columns, names: FieldNames) -> Fields:
    """Renders synchronizations; `device` is a real device here. waits: rows wait for an event and state which one."""
    wait = [
        Field(b',"wait_on_stream":', SIGNED, rows["wait_on_stream"]),
        Field(b',"wait_on_cuda_event_record_corr_id":', SIGNED, rows["wait_on_correlation"]),
        Field(b',"wait_on_cuda_event_id":', UNSIGNED, rows["event"]),
    ]
    return [
        *event("cuda_sync", names, rows, Field(b"", SIGNED, rows["device"])),
        Field(ARGS + b'"cuda_sync_kind":"', TEXT, rows["name"], names.texts),
        Field(b'"'),
        *(wait if waits else ()),
        Field(b',"stream":', SIGNED, rows["stream"].view(np.int32)),
        *numbers(("correlation", rows["correlation"])),
        Field(b',"device":', SIGNED, rows["device"]),
        *numbers(("context", rows["context"])),
        CLOSE,
    ]


def _sync_flow(rows: Columns, names: FieldNames) -> Fields:
    """Renders the end of a flow at a synchronization."""
    return flow("f", "ac2g", rows["correlation"], names, rows, Field(b"", SIGNED, rows["device"]))


def overhead(rows: Columns, names: FieldNames) -> Fields:
    """Renders CUPTI's own work."""
    return [*event("overhead", names, rows, Field(b"-1")), Field(b"},\n")]


class RowForm(NamedTuple):
    """A way to write rows of a table. rows: selects the rows that have this form; None: all."""

    render: Render
    rows: Callable[[Columns], npt.NDArray[np.bool_]] | None = None


EVENT_TYPES = (1, 2)  # types of cuda_sync that name an event
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


def forms(table: Table) -> tuple[RowForm, ...]:
    """Returns the forms of a table's rows."""
    if table.declared is not None:
        return (RowForm(partial(_declared, table.declared)),)
    return _FORMS.get(table.kind) or (RowForm(partial(_gpu_work, table.kind)),)


def with_flow(table: Table, render: Render) -> Render:
    """Returns a renderer that adds the end of a flow right after each row."""
    kind, own = table.kind, None if table.declared is None else table.declared.row
    if kind in API_TABLES or own is ViewerRow.CALL:
        end = _api_flow
    else:
        end = _gpu_flow if kind in GPU_TABLES or own is ViewerRow.GPU else _sync_flow
    return lambda rows, names: [*render(rows, names), *end(rows, names)]


def starts_flow(strings: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Tells for each string whether Kineto begins a flow at calls of this name."""
    return np.array([_starts_flow(text) for text in strings], np.bool_)


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


def _starts_flow(name: str) -> bool:
    plain = name.removesuffix("_ptsz").removesuffix("_ptds")
    return plain in _FLOW_CALLS or plain.startswith(("cudaMemcpy", "cudaMemset"))
