"""Pieces of event rows: what rows of all kinds begin with, have among their arguments and end with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from kineto_trace.arrays.codec import MICROSECONDS, OPTIONAL, SIGNED, TEXT, UNSIGNED, Field, Texts
from kineto_trace.formats.shared.launch_shape_texts import LaunchShapes

Fields = list[Field]
AnyArray = npt.NDArray[Any]
Columns = Mapping[str, AnyArray]  # of the table, and "tid": the viewer's row


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """What rows refer to by number."""

    texts: Texts  # the trace's strings, as names
    arguments: Texts  # those that are ready arguments (inputs of operators), each with a comma before it
    lines: Texts  # lines of sampled slices as arguments, likewise
    base_ns: int  # of all times in the file
    pid: int
    shapes: LaunchShapes


Render = Callable[[Columns, FieldNames], Fields]


def event(category: str, names: FieldNames, rows: Columns, pid: Field) -> Fields:
    """The beginning of a complete event, up to its duration."""
    return [
        Field(b'{"ph":"X","cat":"%s","name":"' % category.encode(), TEXT, rows["name"], names.texts),
        Field(b'","pid":', pid.operation, pid.column),
        Field(pid.literal + b',"tid":', SIGNED, rows["tid"]),
        Field(b',"ts":', MICROSECONDS, rows["start"], base=names.base_ns),
        Field(b',"dur":', MICROSECONDS, rows["duration"]),
    ]


def flow(phase: str, category: str, ids: AnyArray, names: FieldNames, rows: Columns, pid: Field) -> Fields:
    """The flow event of a row, at its start. phase: "s" (start) or "f" (finish)."""
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
    """Unsigned arguments; every literal begins with the comma."""
    return [Field(b',"%s":' % name.encode(), UNSIGNED, column) for name, column in pairs]


def first(fields: Fields, before: bytes) -> Fields:
    """The same fields, with `before` in place of the first comma."""
    return [fields[0]._replace(literal=before + fields[0].literal[1:]), *fields[1:]]


ARGS = b',"args":{'
CLOSE = Field(b"}},\n")


def host_pid(names: FieldNames) -> Field:
    """The traced process as the row's process."""
    return Field(b"%d" % names.pid)


def device_pid(rows: Columns) -> Field:
    """The GPU as the row's process, as Kineto does."""
    return Field(b"", UNSIGNED, rows["device"])


def external_id(rows: Columns) -> Fields:
    """The op that caused a row, where there is one."""
    column = rows["external_id"]
    return [Field(b',"External id":', OPTIONAL, column)] if column.any() else []
