"""Renders the rows of what the program does on the host: operators, annotations, allocations, Python functions, links.

The arguments have Kineto's names. "Ev Idx" numbers the host's rows: operators and annotations by their ids, then
allocations, then exact Python calls.
"""

import numpy as np

from kineto_trace.arrays.codec import MICROSECONDS, OPTIONAL, SIGNED, TEXT, UNSIGNED, Field, PreparedTexts
from kineto_trace.formats.chrome.chrome_fields import (
    ARGS,
    CLOSE,
    Columns,
    FieldNames,
    Fields,
    device_pid,
    event,
    flow,
    host_pid,
)
from kineto_trace.model.activity_tables import SAMPLED_ARGUMENTS
from kineto_trace.model.trace import NO_MODULE, NO_SEQUENCE

_UNFINISHED = PreparedTexts([b',"finished":false', b""])  # indexed by the column `finished`
ANNOTATION_MARGIN_NS = 1  # by which Kineto widens an annotation beyond its GPU work on both sides


def cpu_op(rows: Columns, names: FieldNames) -> Fields:
    """Renders operators."""
    return _op("cpu_op", rows, names)


def user_annotation(rows: Columns, names: FieldNames) -> Fields:
    """Renders ranges that the program named."""
    return _op("user_annotation", rows, names)


def _op(category: str, rows: Columns, names: FieldNames) -> Fields:
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


def forward(rows: Columns, names: FieldNames) -> Fields:
    """Renders the beginning of a link, at the forward operator."""
    return flow("s", "fwdbwd", rows["link"], names, rows, host_pid(names))


def backward(rows: Columns, names: FieldNames) -> Fields:
    """Renders the end of a link, at the backward operator."""
    return flow("f", "fwdbwd", rows["link"], names, rows, host_pid(names))


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


def python_sampled_root(rows: Columns, names: FieldNames) -> Fields:
    """Renders the outermost sampled Python frames."""
    return _sampled(rows, names, Field(b',"Python parent id":null'))


def python_sampled(rows: Columns, names: FieldNames) -> Fields:
    """Renders sampled Python frames that have a caller; `parent` is the caller's row in the table."""
    return _sampled(rows, names, Field(b',"Python parent id":', SIGNED, rows["parent"] + 1))


def _sampled(rows: Columns, names: FieldNames, parent: Field) -> Fields:
    return [
        *event("python_function", names, rows, host_pid(names)),
        Field(ARGS + b'"Python id":', SIGNED, rows["row"] + 1),
        parent,
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
        Field(b"", TEXT, rows["lines"], names.lines),
        Field(b"", TEXT, rows["callees"], names.callees),
        CLOSE,
    ]


def python_call_root(rows: Columns, names: FieldNames) -> Fields:
    """Renders the outermost Python calls that a tracer recorded."""
    return _call(rows, names, Field(b',"Python parent id":null'))


def python_call(rows: Columns, names: FieldNames) -> Fields:
    """Renders Python calls that a tracer recorded and that have a caller."""
    return _call(rows, names, Field(b',"Python parent id":', SIGNED, rows["parent"] + 1))


def _call(rows: Columns, names: FieldNames, parent: Field) -> Fields:
    return [
        *event("python_function", names, rows, host_pid(names)),
        Field(ARGS + b'"Python id":', SIGNED, rows["row"] + 1),
        parent,
        Field(b',"Python thread":', UNSIGNED, rows["thread"]),
        Field(b',"Python module id":', OPTIONAL, rows["module"], base=NO_MODULE),
        Field(b',"Ev Idx":', SIGNED, rows["index"]),
        CLOSE,
    ]
