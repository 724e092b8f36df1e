"""Rows of traces as Arrow columns for SQL: numbers without copies, names as dictionaries.

Every function gives the whole column of one table of one trace. The arrays of the trace are not copied; a column with
missing values gets a bitmap beside them, a column of names the few texts that it uses.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kineto_trace.base.array_types import AnyArray, Flags
from kineto_trace.model.activity_tables import FIRST_ARG_BIT, KINDS, OWN_ROWS, vendor_columns
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, Table, own_tables
from kineto_trace.sql.schema import EVENT_KINDS, MISSING, MISSING_OF_KIND, NAMES, declares
from kineto_trace.structure.activity_links import call_owners, calls, gpu, ops, owners
from kineto_trace.structure.trace_forms import with_current_forms
from kineto_trace.view_api.text_columns import coded_texts

_JSON_MEMBERS = frozenset({"inputs", "args", "hlo"})  # JSON members without braces
_OBJECT = "{{{}}}"  # turns such members into an object
_TOLD_OTHERWISE = frozenset({"device", "stream", "thread", "finished"})  # from the event's pid, tid or phase
_SUMMED = "static_shared_memory"  # files have the sum of both kinds, which is in dynamic_shared_memory
_MODEL_NAMES = {"start_ns": "start", "duration_ns": "duration", "queued_ns": "queued"}


class SqlSource(NamedTuple):
    """A trace and its name in queries."""

    name: str
    context: Context

    @property
    def meant(self) -> Context:
        """Returns its context for tables of activities, which are those that views use."""
        return self.context.get(with_current_forms)


def constant(text: str, count: int) -> pa.Array:
    """Returns the same text for every row."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text], pa.string()))


def _nothing(count: int, type_: pa.DataType) -> pa.Array:
    if type_ == NAMES:
        return pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int32()), pa.array([], pa.string()))
    return pa.nulls(count, type_)


def _numbers(table: Table, column: str) -> pa.Array:
    values = table[column]
    missing = _absent(table, column)
    for value in (*MISSING.get(column, ()), *MISSING_OF_KIND.get((table.kind, column), ())):
        missing |= values == values.dtype.type(value)
    if values.dtype.kind == "f":
        missing |= np.isnan(values)
    return pa.array(values, mask=missing if missing.any() else None)


def _absent(table: Table, column: str) -> Flags:
    """Returns for each row that was read from a file whether it lacked the argument and had no other source of the
    value.
    """
    present = table.origin.get("present")
    if present is None or column in _TOLD_OTHERWISE:
        return np.zeros(len(table), np.bool_)
    if column == _SUMMED:
        return np.ones(len(table), np.bool_)
    bits = 0
    for place, argument in enumerate(KINDS.get(table.kind, ())):
        if column in argument.columns:
            bits |= 1 << (FIRST_ARG_BIT + place)
    if not bits:
        return np.zeros(len(table), np.bool_)
    absent: Flags = (present & np.uint64(bits)) == 0
    return absent


def _file_column(table: Table, column: str, type_: pa.DataType) -> pa.Array:
    """Returns an argument that is not in the table's columns."""
    values = table.origin.get(column)
    if values is None:
        return _nothing(len(table), type_)
    return pa.array(values, mask=_absent(table, column)).cast(type_)


def _phase(table: Table) -> pa.Array:
    codes = table["phase"].astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array([chr(code) for code in range(256)]))


def _text_columns(table: Table) -> frozenset[str]:
    return frozenset(column.name for column in table.schema if column.text)


def raw_column(context: Context, kind: str, name: str, type_: pa.DataType) -> pa.Array:
    """Returns the column with this name in SQL's schema, from the table of this kind."""
    table = context.trace.table(kind)
    strings = context.trace.strings
    if table.declared is not None and name in vendor_columns(table.declared):
        return coded_texts(strings, table[name]) if name in _text_columns(table) else pa.array(table[name])
    column = _MODEL_NAMES.get(name, name)
    if column in table.columns:
        if column == "phase":
            return _phase(table)
        if column in _text_columns(table):
            return coded_texts(strings, table[column], _OBJECT if column in _JSON_MEMBERS else "{}")
        return _numbers(table, column)
    if name == "end_ns":
        return pa.array(table.end())
    if name == "args":
        found = table.origin.get("args")
        return _nothing(len(table), NAMES) if found is None else coded_texts(strings, found, _OBJECT)
    related = _RELATED.get(name)
    return _file_column(table, name, type_) if related is None else related(context, kind)


def activity_column(context: Context, kind: str, name: str, type_: pa.DataType) -> pa.Array:
    """Returns a column of the table of this kind; missing values if this trace declares no such column.

    If traces declare one table in different ways, the first one determines the columns.
    """
    table = context.trace.table(kind)
    if table.declared is not None and not declares(table.declared, name, type_):
        return _nothing(len(table), type_)
    return raw_column(context, kind, name, type_)


def event_column(context: Context, kind: str, name: str, type_: pa.DataType) -> pa.Array:
    """Returns the column with this name of `events`, for the rows of one kind."""
    table = context.trace.table(kind)
    if name == "kind":
        return constant(kind, len(table))
    if name in ("name", "start_ns", "end_ns", "duration_ns", "args") or name in table.columns:
        if kind == "overhead" and name == "thread":
            return _nothing(len(table), type_)
        return raw_column(context, kind, name, type_).cast(type_)
    return _nothing(len(table), type_)


def event_counts(context: Context) -> dict[str, int]:
    """Returns the number of rows of `events` for each kind in the trace."""
    tables = context.trace.tables
    kinds = (*EVENT_KINDS, *own_tables(tables, *OWN_ROWS))
    found = {kind: len(tables[kind]) for kind in kinds if kind in tables}
    return {kind: count for kind, count in found.items() if count}


def _by_row(context: Context, kind: str, values: AnyArray) -> AnyArray:
    """Returns the values of all GPU activities or calls in the order of the rows of a table; -1 where there is none."""
    activities, kinds = (context.get(gpu), GPU_TABLES) if kind in GPU_TABLES else (context.get(calls), API_TABLES)
    own = activities.kind == kinds.index(kind)
    found = np.full(len(context.trace.table(kind)), -1, np.int64)
    found[activities.row[own]] = values[own]
    return found


def _taken(values: AnyArray, places: AnyArray) -> pa.Array:
    """Returns the values at these places; missing for -1."""
    if not len(values):
        return _nothing(len(places), pa.from_numpy_dtype(values.dtype))
    return pa.array(values[places], mask=places < 0)


def _op(context: Context, kind: str) -> pa.Array:
    names = _by_row(context, kind, context.get(owners if kind in GPU_TABLES else call_owners))
    return coded_texts(context.trace.strings, names.astype(np.int32))


def _op_id(context: Context, kind: str) -> pa.Array:
    around = context.get(gpu).op if kind in GPU_TABLES else context.get(calls).op
    return _taken(context.trace.table("cpu_op")["id"], _by_row(context, kind, around))


def _launch_ns(context: Context, kind: str) -> pa.Array:
    return _taken(context.get(calls).start, _by_row(context, kind, context.get(gpu).call))


def _parent_id(context: Context, _kind: str) -> pa.Array:
    tree = context.get(ops)
    parent = tree.nested.tree.parent[tree.place]
    return _taken(context.trace.table("cpu_op")["id"], np.where(parent >= 0, tree.row[parent], -1))


def _depth(context: Context, _kind: str) -> pa.Array:
    tree = context.get(ops)
    return pa.array(tree.nested.tree.depth[tree.place])


def _self_ns(context: Context, _kind: str) -> pa.Array:
    tree = context.get(ops)
    return pa.array(tree.nested.tree.self_time[tree.place])


def _row(context: Context, kind: str) -> pa.Array:
    return pa.array(np.arange(len(context.trace.table(kind)), dtype=np.int64))


_RELATED: dict[str, Callable[[Context, str], pa.Array]] = {
    "op": _op,
    "op_id": _op_id,
    "launch_ns": _launch_ns,
    "parent_id": _parent_id,
    "depth": _depth,
    "self_ns": _self_ns,
    "row": _row,
}
