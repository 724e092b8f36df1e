"""Arguments of activities without a column: the rest of a file's row, as JSON text.

Theory of operation
    The rest of a row's arguments is one text ({"blocks per SM": 0.24, …} without the braces), a number into
    Trace.strings: origin["args"], of operators the column `inputs`, of recorded kernels `hlo`. Few rows differ there,
    so each distinct text is parsed once, and a table has an array of the texts' numbers.

    Arguments with a column (model/activity_tables.py) are requested in the same way.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kineto_trace.arrays.id_sets import distinct
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.model.activity_tables import BOOL, FIRST_ARG_BIT, I32X3, KINDS, SIGNED_U32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Table


@dataclass(frozen=True, slots=True)
class Arguments:
    """The texts of a table.

    text: for each row, the place in `objects`, or NOTHING.
    objects: each distinct text as a dictionary.
    strings: its number in Trace.strings.
    """

    text: Ints
    objects: Sequence[dict[str, Any]]
    strings: Ints

    def values(self, key: str) -> list[Any]:
        """Returns the argument in each distinct text; None if it is missing or null."""
        return [found.get(key) for found in self.objects]


def arguments(context: Context, kind: str) -> Arguments:
    """Returns all texts of a table, each parsed once."""
    return context.get(_part(kind))


def argument(context: Context, kind: str, key: str) -> Floats:
    """Returns the argument as a number for each row of a table; NaN if it is missing or not a number ("N/A").

    kind: of the table, such as "kernel"; key: in Kineto's spelling, such as "blocks per SM".
    """
    table = context.trace.table(kind)
    found = _column(table, key)
    parsed = arguments(context, kind)
    if parsed.objects:
        numbers = np.array([_number(value) for value in parsed.values(key)] + [np.nan])
        found = np.where(np.isnan(found), numbers[parsed.text], found)
    return found


def argument_objects(context: Context, kind: str, key: str) -> tuple[Ints, list[Any]]:
    """Returns the place of each row's value in the list (or NOTHING), and the values of each distinct text.

    Values are texts, lists, …; equal ones may occur more than once, for texts that differ in other arguments.
    """
    parsed = arguments(context, kind)
    values = parsed.values(key)
    missing = np.array([value is None for value in values] + [True])
    return np.where(missing[parsed.text], NOTHING, parsed.text), values


def argument_texts(context: Context, kind: str, key: str) -> tuple[Ints, list[str]]:
    """Returns the place of each row's text in the list (or NOTHING), and the distinct texts of an argument.

    Values of other types are given as JSON.
    """
    places, values = argument_objects(context, kind, key)
    numbers: dict[str, int] = {}
    texts = [None if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]
    merged = np.array(
        [NOTHING if text is None else numbers.setdefault(text, len(numbers)) for text in texts] + [NOTHING], np.int64
    )
    return merged[places], list(numbers)


def parse(text: str) -> dict[str, Any]:
    """Parses JSON members without braces into a dictionary; empty if they are invalid."""
    try:
        found = json.loads("{" + text + "}", strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def has_column(table: Table, key: str) -> Flags:
    """Returns which rows have this argument in a column: all rows that are not from a file do."""
    if "present" not in table.origin:
        return np.ones(len(table), np.bool_)
    bits = sum(1 << (FIRST_ARG_BIT + place) for place, arg in enumerate(KINDS[table.kind]) if arg.key == key)
    found: Flags = table.origin["present"] & np.uint64(bits) != 0
    return found


@cache
def _part(kind: str) -> Callable[[Context], Arguments]:
    def part(context: Context) -> Arguments:
        return _parsed(context, kind)

    return part


def _parsed(context: Context, kind: str) -> Arguments:
    table = context.trace.table(kind)
    numbers = table.columns.get("inputs", table.origin.get("args", table.columns.get("hlo")))
    if numbers is None or not len(numbers):
        return Arguments(np.full(len(table), NOTHING, np.int64), [], np.zeros(0, np.int64))
    found = np.sort(distinct(numbers[numbers != NO_STRING]).astype(np.int64))
    places = np.full(int(found[-1]) + 2 if len(found) else 1, NOTHING, np.int64)
    places[found] = np.arange(len(found))
    strings = context.trace.strings
    return Arguments(places[numbers], [parse(strings[number]) for number in found.tolist()], found)


def _column(table: Table, key: str) -> Floats:
    """Returns the argument from its column."""
    found = np.full(len(table), np.nan)
    present = table.origin.get("present")
    for place, arg in enumerate(KINDS.get(table.kind, ())):
        if arg.key != key or arg.type in (BOOL, I32X3) or present is None:
            continue
        column = table.columns.get(arg.column)
        column = table.origin.get(arg.column) if column is None else column
        if column is None and arg.column == "external_id":
            column = table.columns.get("id")  # ops: it is their id
        if column is not None and arg.type == SIGNED_U32:
            column = column.view(np.int32)
        if column is not None:
            found = np.where(present >> np.uint64(FIRST_ARG_BIT + place) & np.uint64(1) != 0, column, found)
    return found


def _number(value: Any) -> float:
    if isinstance(value, bool) or value is None:
        return np.nan
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e300 else np.nan
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return np.nan
    return np.nan
