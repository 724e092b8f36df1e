"""Reads the rows of an accelerator in the traces of torch's profiler: kernels, copies, fills and calls.

Theory of operation
    An accelerator's profiler writes rows of Kineto's categories. Which arguments a row has is up to the vendor; those
    with Kineto's names become the columns of the tables, and all others are left out. A row that does not name its
    device and stream among them has them as its process and thread, as Kineto writes them. "External id" is the number
    that the document gives to an operator; the reader of the documents knows which id that operator gets here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.decode.torch.kineto_text import Damage, Row
from kineto_trace.model.activity_tables import KINDS
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, SCHEMAS, Table, make_table

CALL_ENDINGS = {"_runtime": "cuda_runtime", "_driver": "cuda_driver"}
_LAUNCH_SHAPES = ("grid", "block")
_arguments = msgspec.json.Decoder(list[dict[str, Any]])
_one_argument = msgspec.json.Decoder(dict[str, Any])
_NO_ARGUMENTS: Mapping[str, Any] = {}

AnyArray = npt.NDArray[Any]


def table_of(category: str) -> str:
    """Returns the table that rows of a category belong to; empty if they are not an accelerator's."""
    if category in GPU_TABLES:
        return category
    return next((table for ending, table in CALL_ENDINGS.items() if category.endswith(ending)), "")


class DeviceRows:
    """Collects the rows of all documents.

    wanted: the categories to keep; None: all. number: returns the number of a name in the string table.
    """

    def __init__(self, wanted: frozenset[str] | None, number: Callable[[str], int]) -> None:
        self._wanted = wanted
        self._number = number
        self._parts: dict[str, list[dict[str, AnyArray]]] = {}
        self._categories: dict[str, Counter[str]] = {}
        self.rows = 0

    def wants(self, category: str) -> bool:
        """Tells whether rows of this category are to be kept."""
        return self._wanted is None or category in self._wanted

    def add(self, rows: Sequence[Row], times: Mapping[str, AnyArray], document: int, damage: Damage) -> None:
        """Adds rows of a block. times: their starts (Unix ns) and durations; document: its number among all."""
        arguments = _decode([bytes(row.args) for row in rows], damage)
        by_table: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            by_table.setdefault(table_of(row.cat), []).append(place)
            self._categories.setdefault(table_of(row.cat), Counter())[row.cat] += 1
        for table, places in by_table.items():
            chosen = [rows[place] for place in places]
            columns = _columns(table, chosen, [arguments[place] for place in places])
            columns["name"] = np.array([self._number(row.name) for row in chosen], np.int32)
            columns["document"] = np.full(len(places), document, np.int64)
            columns |= {name: column[places] for name, column in times.items()}
            self._parts.setdefault(table, []).append(columns)
        self.rows += len(rows)

    def tables(self, operator_ids: Callable[[AnyArray, AnyArray], AnyArray]) -> dict[str, Table]:
        """Returns the tables that have rows.

        operator_ids: for each document and number of an operator in it, the id of that operator; 0: unknown.
        """
        found = {}
        for kind in (*GPU_TABLES, *API_TABLES):
            parts = self._parts.get(kind)
            if parts:
                columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                columns["external_id"] = operator_ids(columns.pop("document"), columns["external_id"])
                found[kind] = make_table(kind, len(columns["start"]), columns)
        return found

    def categories(self) -> dict[str, str]:
        """Returns by table how most of its rows are called, where that is not the table's name."""
        names = {table: counts.most_common(1)[0][0] for table, counts in self._categories.items()}
        return {table: name for table, name in names.items() if name != table}

    def devices(self) -> set[int]:
        """Returns the numbers of the devices that have rows."""
        found: set[int] = set()
        for kind in GPU_TABLES:
            for part in self._parts.get(kind, ()):
                found.update(unique_values(part["device"]).tolist())
        return found


def _columns(table: str, rows: Sequence[Row], arguments: Sequence[Mapping[str, Any]]) -> dict[str, AnyArray]:
    """Returns the columns that rows of one table have, but for names and times."""
    dtypes = {column.name: np.dtype(column.dtype) for column in SCHEMAS[table]}
    columns = {}
    for arg in KINDS[table]:
        if arg.column in dtypes and arg.column not in columns:
            keys = [each.key for each in KINDS[table] if each.column == arg.column]
            columns[arg.column] = _numbers(arguments, keys, dtypes[arg.column], arg.default)
    if table in API_TABLES:
        columns["thread"] = _places([row.tid for row in rows])
        return columns
    for column, place in (("device", [row.pid for row in rows]), ("stream", [row.tid for row in rows])):
        named = np.array([column in each for each in arguments], np.bool_)
        columns[column] = np.where(named, columns[column], _places(place))
    if table == "kernel":
        for shape in _LAUNCH_SHAPES:
            for axis, values in zip("xyz", _triples(arguments, shape), strict=True):
                columns[f"{shape}_{axis}"] = values
    return columns


def _numbers(
    arguments: Sequence[Mapping[str, Any]], keys: Sequence[str], dtype: np.dtype[Any], default: int
) -> AnyArray:
    """Returns the first of these arguments of each row that is a number of the column's type; else the default."""
    limits = np.iinfo(dtype)
    values = []
    for each in arguments:
        value = next((each[key] for key in keys if key in each), default)
        fits = isinstance(value, int) and limits.min <= value <= limits.max
        values.append(value if fits else min(default, limits.max))
    return np.array(values, dtype)


def _triples(arguments: Iterable[Mapping[str, Any]], key: str) -> npt.NDArray[np.int32]:
    """Returns the three numbers of a launch shape by axis; 0 where a row has none that fit."""
    found = []
    for each in arguments:
        shape: Any = each.get(key)
        fits = isinstance(shape, list) and len(shape) == 3 and all(map(_is_size, shape))
        found.append(shape if fits else [0, 0, 0])
    return np.array(found, np.int32).reshape(-1, 3).T


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 31


def _places(ids: Iterable[int | str]) -> npt.NDArray[np.uint32]:
    return np.array([each & 0xFFFFFFFF if isinstance(each, int) else 0 for each in ids], np.uint32)


def _decode(texts: Sequence[bytes], damage: Damage) -> list[Mapping[str, Any]]:
    try:
        return [*_arguments.decode(b"[" + b",".join(texts) + b"]")]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [_decode_one(text, damage) for text in texts]


def _decode_one(text: bytes, damage: Damage) -> Mapping[str, Any]:
    try:
        return _one_argument.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        damage.arguments += 1
        return _NO_ARGUMENTS
