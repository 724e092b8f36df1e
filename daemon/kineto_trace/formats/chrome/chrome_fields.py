"""Field lists that event rows of all kinds share: how a row begins, its common arguments and how it ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from kineto_trace.arrays.codec import MICROSECONDS, OPTIONAL, SIGNED, TEXT, UNSIGNED, Field, PreparedTexts
from kineto_trace.formats.shared.launch_shape_texts import LaunchShapes
from kineto_trace.structure.captured_graphs import CAPTURED_OP

Fields = list[Field]
AnyArray = npt.NDArray[Any]
Columns = Mapping[str, AnyArray]  # the table's columns, and "tid": the viewer's row


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


ARGS = b',"args":{'
CLOSE = Field(b"}},\n")


def host_pid(names: FieldNames) -> Field:
    """Returns the pid field of host rows: the traced process."""
    return Field(b"%d" % names.pid)


def device_pid(rows: Columns) -> Field:
    """Returns the pid field of GPU rows: the device number, as Kineto does."""
    return Field(b"", UNSIGNED, rows["device"])


def captured_op(rows: Columns, names: FieldNames) -> Fields:
    """Returns the operator that added a row's work to its CUDA graph, for rows that have one."""
    return [Field(b"", TEXT, rows[CAPTURED_OP], names.captured)] if CAPTURED_OP in rows else []


def external_id(rows: Columns) -> Fields:
    """Returns the id of the op that caused a row, for rows that have one."""
    column = rows["external_id"]
    return [Field(b',"External id":', OPTIONAL, column)] if column.any() else []
