"""Decodes the traces of torch's profiler ("kineto_json/1") into the tables cpu_op, user_annotation, python_function.

The rows of an accelerator, where torch's profiler recorded one, become those of GPUs.

Theory of operation
    kineto_text.py provides the rows in blocks. Each block is reduced to columns: numbers, and names and arguments by
    their numbers in the string table. One regular expression over the whole block removes an op's arguments that have a
    column of their own; the remaining text ("Input Dims", "Call stack", whatever a version writes) is the column
    `inputs`, word for word. "External id" and "Ev Idx" only number the rows of one document: the rows get new numbers
    here, in the order of their starts.

Times
    Kineto writes microseconds after the document's base with three decimals. As floats they are exact to the nanosecond
    as long as they are below 2**43: the base is at most 7,889,238 s back, the distance of neighbouring floats there is
    2**-10, so the nearest thousandth is the one that was written. The integral part is subtracted first, so that no
    product is rounded.

Torch's numbers of threads
    A backward op names the thread of its forward op by torch's own thread number, which no other row contains. But
    Kineto draws an arrow from the forward op, on a thread with a system id, to the backward op: the arrow shows which
    number belongs to which id.

Reads the rows of an accelerator in the traces of torch's profiler: kernels, copies, fills and calls.
    An accelerator's profiler writes rows of Kineto's categories. Which arguments a row has is up to the vendor; those
    with Kineto's names become the columns of the tables, and all others are dropped. A row that does not name its
    device and stream among them has them as its process and thread, as Kineto writes them. "External id" is the number
    that the document gives to an operator; the reader of the documents knows which id that operator gets here.

Computes the floating-point operations of ops from their recorded inputs.

Torch's profiler computes them with "with_flops", but does not write them into its trace. They are computed here in the
same way, for the same ops, from the sizes in the trace: a multiplication and an addition are two operations; what an op
does beside its products (the addition of addmm's bias) does not count.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from kineto_agent.protocol.records import SCOPE_BACKWARD_FUNCTION, SCOPE_USER, TORCH_PROFILER_FORMAT

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.base.array_types import AnyArray, Floats, Ints, Ints32, UInts32
from kineto_trace.base.quantities import times
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.torch.kineto_text import (
    Damage,
    Document,
    PythonCalls,
    Row,
    decoded_arguments,
    documents,
    thread_ids,
)
from kineto_trace.model.activity_tables import KINDS
from kineto_trace.model.trace import (
    API_TABLES,
    GPU_TABLES,
    NO_STRING,
    OP_TABLES,
    SCHEMAS,
    StringTable,
    Table,
    make_table,
)
from kineto_trace.spool.raw_records import RawSource

FORMAT = TORCH_PROFILER_FORMAT
_OWN_COLUMN = re.compile(
    rb'(?:"(?:External id|Ev Idx|Sequence number|Fwd thread id)": ?-?\d+|"Record function id": ?0(?!\d)'
    rb'|"finished": ?(?:true|false)),? ?'
)
_BETWEEN = b"\0"  # between the arguments of two rows; JSON never contains it
_AROUND = b" \n,"
_KNOWN_ELSEWHERE = ("", "Trace", "ac2g", "fwdbwd")  # M rows and marks, the recording's span, arrows
_MAX_OTHERS = 8
_NUMBER_BITS = 40  # of an operator's number in its document, below the document's number
_MOST_NUMBER = (1 << _NUMBER_BITS) - 1
CALL_ENDINGS = {"_runtime": "cuda_runtime", "_driver": "cuda_driver"}
_LAUNCH_SHAPES = ("grid", "block")
_arguments = msgspec.json.Decoder(list[dict[str, Any]])
_one_argument = msgspec.json.Decoder(dict[str, Any])
ARGUMENT = "flops"
_MAX_DIMENSIONS = 64  # torch's limit
_Sizes = Sequence[Any]


class _OpArgs(msgspec.Struct, gc=False):
    number: int = msgspec.field(name="External id", default=0)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    finished: bool = True


_op_args = msgspec.json.Decoder(list[_OpArgs])
_one_op_args = msgspec.json.Decoder(_OpArgs)


class _Numbers(dict[bytes, int]):
    """Maps argument texts to their numbers in the string table, and empty ones to NO_STRING."""

    def __init__(self, strings: StringTable) -> None:
        super().__init__()
        self._strings = strings

    def __missing__(self, text: bytes) -> int:
        stripped = text.strip(_AROUND).removeprefix(b"{").removesuffix(b"}").strip(_AROUND)
        number = self._strings.add(stripped.decode("utf-8", "replace")) if stripped else NO_STRING
        self[text] = number
        return number


class _Names(dict[str, int]):
    """Maps names to their numbers in the string table."""

    def __init__(self, strings: StringTable) -> None:
        super().__init__()
        self._strings = strings

    def __missing__(self, text: str) -> int:
        number = self[text] = self._strings.add(text)
        return number


@dataclass(slots=True)
class _Arrows:
    """The "s" or "f" rows of fwdbwd arrows: id, thread, time in microseconds."""

    ids: list[int | str] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if isinstance(row.tid, int):
            self.ids.append(row.id)
            self.threads.append(row.tid)
            self.times.append(row.ts)


class _Reader:
    """Collects the columns of all documents. wanted: the activity types to keep; None: all."""

    def __init__(self, strings: StringTable, wanted: frozenset[str] | None, *, modules_only: bool) -> None:
        self._names = _Names(strings)
        self._documents = 0
        self._numbers = _Numbers(strings)
        self._parts: list[dict[str, AnyArray]] = []
        self._threads: Counter[tuple[int, int]] = Counter()  # torch's number, system id
        self._python = PythonCalls(modules_only=modules_only)
        self.device_rows = DeviceRows(wanted, self._names.__getitem__)
        self.devices: list[dict[str, Any]] = []
        self.rows = 0
        self.cut = 0
        self.others: Counter[str] = Counter()

    def read(self, document: Document, blocks: Iterator[list[Row]], damage: Damage) -> None:
        """Reads one document to its end."""
        parts: list[dict[str, AnyArray]] = []
        starts, ends = _Arrows(), _Arrows()
        for rows in blocks:
            ops: list[Row] = []
            calls: list[Row] = []
            on_device: list[Row] = []
            for row in rows:
                category = row.cat
                if category == "python_function":
                    calls.append(row)
                elif category in OP_TABLES:
                    ops.append(row)
                elif category == "fwdbwd":
                    (starts if row.ph == "s" else ends).add(row)
                elif table_of(category):
                    if self.device_rows.wants(category):
                        on_device.append(row)
                elif category not in _KNOWN_ELSEWHERE:
                    self.others[category] += 1
            self.rows += len(ops) + len(calls)
            if ops:
                parts.append(self._op_columns(ops, damage))
            self._python.add(calls, _times(calls), [self._names[row.name] for row in calls])
            if on_device:
                times = _times(on_device)
                times["start"] += document.base_ns
                self.device_rows.add(on_device, times, self._documents, damage)
        self.devices += document.devices
        self._python.end_document(document.base_ns)
        self.cut += not document.whole
        if parts:
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            self._learn_threads(joined, starts, ends)
            joined["start"] += document.base_ns
            joined["number"] += self._documents << _NUMBER_BITS
            self._parts.append(joined)
        self._documents += 1

    def _op_columns(self, rows: list[Row], damage: Damage) -> dict[str, AnyArray]:
        texts = [bytes(row.args) for row in rows]
        args: list[_OpArgs] = decoded_arguments(_op_args, _one_op_args, texts, _OpArgs(), damage)
        rests = _OWN_COLUMN.sub(b"", _BETWEEN.join(texts)).split(_BETWEEN)
        times = _times(rows)
        return {
            **times,
            "name": np.array([self._names[row.name] for row in rows], np.int32),
            "thread": thread_ids(rows),
            "user": np.array([row.cat == "user_annotation" for row in rows], np.bool_),
            "inputs": np.array([self._numbers[rest] for rest in rests], np.int32),
            "number": np.array([arg.number & _MOST_NUMBER for arg in args], np.int64),
            "sequence": np.array([arg.sequence for arg in args], np.int64),
            "forward_thread": np.array([arg.forward_thread & 0xFFFFFFFF for arg in args], np.uint32),
            "finished": np.array([arg.finished for arg in args], np.uint8),
        }

    def _learn_threads(self, ops: Mapping[str, AnyArray], starts: _Arrows, ends: _Arrows) -> None:
        """Learns from the arrows to backward ops which of torch's numbers belongs to which thread."""
        from_thread = dict(zip(starts.ids, starts.threads, strict=True))
        backward = np.flatnonzero(ops["forward_thread"])
        numbers = dict(
            zip(
                zip(ops["thread"][backward].tolist(), ops["start"][backward].tolist(), strict=True),
                ops["forward_thread"][backward].tolist(),
                strict=True,
            )
        )
        times = nanoseconds(np.array(ends.times, np.float64)).tolist()
        for key, thread, time in zip(ends.ids, ends.threads, times, strict=True):
            number = numbers.get((thread, time))
            forward = from_thread.get(key)
            if number is not None and forward is not None:
                self._threads[number, forward] += 1

    def tables(self) -> dict[str, Table]:
        """Returns the tables of all documents; ops are numbered in the order of their starts, parents first."""
        tables = {"python_function": self._python.table()}
        if not self._parts:
            tables |= {kind: make_table(kind, 0, {}) for kind in OP_TABLES}
            return tables | self.device_rows.tables(lambda _documents, numbers: np.zeros_like(numbers))
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        order = np.lexsort((-columns["duration"], columns["start"]))
        columns = {name: column[order] for name, column in columns.items()}
        columns["id"] = np.arange(1, len(order) + 1)
        columns["torch_thread"] = self._torch_threads(columns["thread"])
        numbers = columns.pop("number")

        def ids(documents: AnyArray, wanted: AnyArray) -> AnyArray:
            keys = (documents << _NUMBER_BITS) + np.clip(wanted, 0, _MOST_NUMBER)
            known = lookup(keys.astype(np.uint64), numbers.astype(np.uint64), columns["id"], 0)
            found: AnyArray = np.where(wanted > 0, known, 0)
            return found

        tables |= self.device_rows.tables(ids)
        user = columns.pop("user")
        backward = columns["forward_thread"] > 0
        columns["scope"] = np.where(user, SCOPE_USER, np.where(backward, SCOPE_BACKWARD_FUNCTION, 0))
        for kind, chosen in (("cpu_op", ~user), ("user_annotation", user)):
            part = {name: column[chosen] for name, column in columns.items()}
            tables[kind] = make_table(kind, int(np.count_nonzero(chosen)), part)
        return tables

    def _torch_threads(self, threads: AnyArray) -> AnyArray:
        numbers: dict[int, int] = {}
        for (number, thread), _count in self._threads.most_common():
            numbers.setdefault(thread, number)
        found, places = np.unique(threads, return_inverse=True)
        return np.array([numbers.get(thread, 0) for thread in found.tolist()], np.uint32)[places]


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
        """Returns whether rows of this category are to be kept."""
        return self._wanted is None or category in self._wanted

    def add(self, rows: Sequence[Row], times: Mapping[str, AnyArray], document: int, damage: Damage) -> None:
        """Adds rows of a block. times: their starts (Unix ns) and durations; document: its number among all."""
        texts = [bytes(row.args) for row in rows]
        arguments: list[dict[str, Any]] = decoded_arguments(_arguments, _one_argument, texts, {}, damage)
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
        """Returns by table the category of most of its rows, if that is not the table's name."""
        names = {table: counts.most_common(1)[0][0] for table, counts in self._categories.items()}
        return {table: name for table, name in names.items() if name != table}

    def devices(self) -> set[int]:
        """Returns the numbers of the devices that have rows."""
        found: set[int] = set()
        for kind in GPU_TABLES:
            for part in self._parts.get(kind, ()):
                found.update(unique_values(part["device"]).tolist())
        return found


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all documents of a source; names and arguments go into `strings`."""
    damage = Damage()
    wanted = _wanted(source)
    modules_only = source.metadata.get("python_rows") == "modules"
    reader = _Reader(strings, wanted, modules_only=modules_only)
    for document, blocks in documents(source.buffers(), damage):
        reader.read(document, blocks, damage)
    tables = reader.tables()
    if source.metadata.get("flops"):
        tables["cpu_op"] = add_flops(tables["cpu_op"], strings)
    for unwanted in set(OP_TABLES) - (set(OP_TABLES) if wanted is None else wanted):
        del tables[unwanted]
    return Decoded(
        tables=tables,
        records=reader.rows + reader.device_rows.rows,
        undecoded=damage.rows + damage.documents,
        warnings=tuple(_warnings(damage, reader)),
        metadata=_devices(reader, str(source.metadata.get("accelerator", ""))),
        categories=reader.device_rows.categories(),
    )


def _wanted(source: RawSource) -> frozenset[str] | None:
    """Returns the activity types that were asked for; None: all."""
    found = source.metadata.get("activity_types")
    return frozenset(map(str, found)) if isinstance(found, list) else None


def _devices(reader: "_Reader", accelerator: str) -> dict[str, Any]:
    """Returns the properties of the devices, as reported by their profiler, as metadata about the target."""
    told = {each["id"]: each for each in reader.devices if isinstance(each.get("id"), int)}
    used = reader.device_rows.devices()
    if not used:
        return {}
    named = {number: {"id": number, "name": accelerator} for number in used if accelerator}
    return {"devices": [each for _, each in sorted({**named, **told}.items())]}


def nanoseconds(microseconds: Floats) -> Ints:
    """Converts microseconds to ns, exactly for times with three decimals below 2**43."""
    whole = np.floor(microseconds)
    result: Ints = whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
    return result


def _warnings(damage: Damage, reader: "_Reader") -> Iterator[str]:
    if reader.cut:
        yield times(reader.cut, "trace from torch's profiler is", "traces from torch's profiler are") + " truncated"
    if damage.arguments:
        yield f"{times(damage.arguments, 'op has', 'ops have')} no arguments: torch's profiler wrote invalid JSON there"
    if damage.documents:
        yield times(damage.documents, "trace", "traces") + " from torch's profiler could not be read at all"
    if reader.others:
        kinds = ", ".join(f"{count} {kind:.40}" for kind, count in reader.others.most_common(_MAX_OTHERS))
        yield f"left out rows of torch's profiler that are not operators, annotations or Python calls: {kinds}"


def _times(rows: list[Row]) -> dict[str, AnyArray]:
    return {
        "start": nanoseconds(np.array([row.ts for row in rows], np.float64)),
        "duration": nanoseconds(np.array([row.dur for row in rows], np.float64)),
    }


def table_of(category: str) -> str:
    """Returns the table for rows of a category; empty if they are not an accelerator's."""
    if category in GPU_TABLES:
        return category
    return next((table for ending, table in CALL_ENDINGS.items() if category.endswith(ending)), "")


def _columns(table: str, rows: Sequence[Row], arguments: Sequence[Mapping[str, Any]]) -> dict[str, AnyArray]:
    """Returns the columns of rows of one table, except for names and times."""
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
    """Returns each row's first of these arguments that is a number of the column's type; else the default."""
    limits = np.iinfo(dtype)
    values = []
    for each in arguments:
        value = next((each[key] for key in keys if key in each), default)
        fits = isinstance(value, int) and limits.min <= value <= limits.max
        values.append(value if fits else min(default, limits.max))
    return np.array(values, dtype)


def _triples(arguments: Iterable[Mapping[str, Any]], key: str) -> Ints32:
    """Returns the three numbers of a launch shape by axis; 0 where a row has none that fit."""
    found = []
    for each in arguments:
        shape: Any = each.get(key)
        fits = isinstance(shape, list) and len(shape) == 3 and all(map(_is_size, shape))
        found.append(shape if fits else [0, 0, 0])
    return np.array(found, np.int32).reshape(-1, 3).T


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 31


def _places(ids: Iterable[int | str]) -> UInts32:
    return np.array([each & 0xFFFFFFFF if isinstance(each, int) else 0 for each in ids], np.uint32)


def _product(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the FLOPs of a product of matrices, or of stacks with equally many matrices."""
    if len(first) != len(second) or len(first) not in (2, 3) or first[-1] != second[-2]:
        return 0
    return 2 * math.prod(first) * second[-1]


def _convolution(dims: _Sizes, concrete: Sequence[str]) -> int:
    batch, channels, *image = dims[0]
    out_channels, _, *kernel = dims[1]
    stride, padding, dilation = (_pair(text) for text in concrete[3:6])
    groups = int(concrete[6])
    if len(image) != 2 or len(kernel) != 2 or groups < 1 or min(stride) < 1:
        return 0
    outside = [
        (image[axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    ]
    return int(2 * batch * math.prod(outside) * math.prod(kernel) * channels * out_channels // groups)


def _pair(text: str) -> list[int]:
    """Parses "[1, 1]", or one number that stands for both."""
    values = json.loads(text)
    both = [values] if isinstance(values, int) else [int(value) for value in values]
    return both * 2 if len(both) == 1 else both


def flops(name: str, inputs: str) -> int:
    """Returns the FLOPs of one op with these inputs; 0 if unknown.

    inputs: Kineto's JSON arguments without braces.
    """
    compute = _FLOPS.get(name)
    if compute is None:
        return 0
    try:
        arguments = json.loads("{" + inputs + "}")
        return compute([_sizes(each) for each in arguments["Input Dims"]], arguments["Concrete Inputs"])
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        return 0


def _sizes(value: Any) -> list[int]:
    """Returns the sizes of one tensor; [] for other values, such as a list of tensors. The text is not trusted."""
    known = isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 40 for size in value)
    return value if known and len(value) <= _MAX_DIMENSIONS else []


def add_flops(ops: Table, strings: StringTable) -> Table:
    """Returns cpu_op with one more argument for ops whose number is known."""
    keys = (ops["name"].astype(np.int64) << 32) | (ops["inputs"].astype(np.int64) & 0xFFFFFFFF)
    pairs, places = np.unique(keys, return_inverse=True)
    numbers = np.array([_with_flops(pair >> 32, pair & 0xFFFFFFFF, strings) for pair in pairs.tolist()], np.int32)
    columns = {**ops.columns, "inputs": numbers[places] if len(ops) else ops["inputs"]}
    return make_table(ops.kind, len(ops), columns)


def _with_flops(name: int, inputs: int, strings: StringTable) -> int:
    if inputs == NO_STRING & 0xFFFFFFFF:
        return NO_STRING
    text = strings.strings[inputs]
    count = flops(strings.strings[name], text)
    return strings.add(f'{text}, "{ARGUMENT}": {count}') if count else inputs


_FLOPS: dict[str, Callable[[_Sizes, Sequence[str]], int]] = {
    "aten::mm": lambda dims, _: _product(dims[0], dims[1]),
    "aten::bmm": lambda dims, _: _product(dims[0], dims[1]),
    "aten::addmm": lambda dims, _: _product(dims[1], dims[2]),
    "aten::baddbmm": lambda dims, _: _product(dims[1], dims[2]),
    "aten::conv2d": _convolution,
    "aten::add": lambda dims, _: math.prod(dims[0]),
    "aten::mul": lambda dims, _: math.prod(dims[0]),
}
