"""Stored traces: a folder with one Parquet file per kind of activity, one of all strings, and trace.json.

Theory of operation
    KIND.parquet has the columns of SCHEMAS, and after them those of Table.origin as origin_NAME; times are int64 ns.
    Columns of texts are dictionary-encoded, so that any reader of Parquet understands the file alone; in memory they
    are numbers into Trace.strings again. strings.parquet has these strings in their order. trace.json has everything
    else, including the size and columns of each file and the declarations of tables that are not in SCHEMAS. Times,
    correlations and places are delta-encoded, everything is compressed with zstd at level 1: about eight bytes an
    activity, without loss.

    Opening reads trace.json alone. Tables, columns (Parquet's column projection, from memory-mapped files) and strings
    are read on first access.

    Texts that are not valid Unicode (half of a surrogate pair, which JSON can express) cannot be stored as Parquet's
    texts: a trace with such a text has its strings as bytes, and numbers where others have texts, as in format 2.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kineto_trace.base.array_types import AnyArray
from kineto_trace.base.atomic_files import atomic_file, write_atomically
from kineto_trace.base.quantities import memory_errors, require_memory
from kineto_trace.errors import SpoolError
from kineto_trace.model import source_coverage
from kineto_trace.model.activity_tables import ActivityTable, Column, declared_from_json, declared_to_json
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import NO_STRING, ORIGIN_COLUMNS, SCHEMAS, Lazy, LazyColumns, Losses, Table, Trace

FORMAT_VERSION = 3  # 2: operators and external ids; 3: texts in the files of the tables, and rows' forms in files
READABLE_VERSIONS = (2, 3)
TRACE_FILE = "trace.json"
STRINGS_FILE = "strings.parquet"
ORIGIN_PREFIX = "origin_"
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1
ROW_GROUP_ROWS = 1 << 20
DICTIONARY_BYTES = 1 << 28  # a column whose texts take more is stored without a dictionary
MAX_TEXT_BYTES = 1 << 30  # of all strings of a trace; more exceeds Parquet's 32-bit offsets
ORIGIN_TEXTS = frozenset(ORIGIN_PREFIX + column.name for column in ORIGIN_COLUMNS if column.text)
# Columns that grow steadily or by small steps; the others are dictionary-encoded.
DELTA_COLUMNS = frozenset(
    {"start", "duration", "correlation", "queued", "parent", "bytes", "graph_node_id"}
    | {"id", "external_id", "sequence", "op", "address", "total_allocated"}
    | {f"{ORIGIN_PREFIX}{n}" for n in ("place", "event_index", "python_id", "python_parent_id")}
)
# Columns of measured values, which seldom repeat: their bytes are stored by significance, and half of them are 0.
SPLIT_COLUMNS = frozenset({"value"})
# The value of a column that an older version did not store; others are 0.
_ABSENT: Mapping[str, int] = {
    "inputs": NO_STRING,
    "lines": NO_STRING,
    "callees": NO_STRING,
    "hlo": NO_STRING,
    "module": -1,
    "total_reserved": -1,
    "category": NO_STRING,
}

Fetch = Callable[[str], object]
MAX_NUMBER = 1 << 63
MAX_OWN_TABLES = 64
_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CATEGORY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NUMBERS = re.compile(r"[<>|=]?[iufb][1248]")  # the types of columns, as numpy writes them


# ------------------------------------------------------------ writing


def save_columns(trace: Trace, directory: Path) -> list[Path]:
    """Writes a trace. Each file appears completely, trace.json, which lists them, last. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = _as_texts(trace.strings)
    paths = [_save_table(table, texts, directory / f"{kind}.parquet") for kind, table in trace.tables.items()]
    strings = directory / STRINGS_FILE
    encoded = pa.array([_bytes(text) for text in trace.strings], pa.large_binary()) if texts is None else texts
    _write(strings, pa.table({"text": encoded}), {"use_dictionary": False, "write_statistics": False})
    description = {
        "format_version": FORMAT_VERSION,
        "target": json.loads(trace.target.to_json()),
        "strings": {"count": len(trace.strings), "bytes": strings.stat().st_size},
        "tables": {
            kind: {
                "rows": len(table),
                "bytes": path.stat().st_size,
                "columns": list(table.columns),
                "origin": {name: array.dtype.str for name, array in table.origin.items()},
                **({} if table.declared is None else {"declared": declared_to_json(table.declared)}),
            }
            for (kind, table), path in zip(trace.tables.items(), paths, strict=True)
        },
        "window_start_ns": trace.window_start_ns,
        "window_end_ns": trace.window_end_ns,
        "devices": [dict(device) for device in trace.devices],
        "versions": dict(trace.versions),
        "losses": asdict(trace.losses),
        "sample_period_ns": trace.sample_period_ns,
        "head": None if trace.head is None else dict(trace.head),
        "notes": list(trace.notes),
        "coverage": [each.to_json() for each in trace.coverage],
        "categories": dict(trace.categories),
    }
    path = directory / TRACE_FILE
    write_atomically(path, json.dumps(description).encode())
    return [*paths, strings, path]


def _as_texts(strings: Sequence[str]) -> pa.Array | None:
    """Returns the strings for Arrow; None if some are not valid Unicode or they are too long in total."""
    try:
        texts = pa.array(list(strings), pa.large_string())
    except UnicodeEncodeError:
        return None
    return texts.cast(pa.string()) if texts.nbytes < MAX_TEXT_BYTES else None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _save_table(table: Table, texts: pa.Array | None, path: Path) -> Path:
    columns = {**table.columns, **{ORIGIN_PREFIX + name: array for name, array in table.origin.items()}}
    text_columns = _text_columns(table.schema) if texts is not None else frozenset()
    arrays = [
        _with_texts(column, texts) if name in text_columns else pa.array(column) for name, column in columns.items()
    ]
    schema = pa.schema(
        [pa.field(name, array.type, nullable=name in text_columns) for name, array in zip(columns, arrays, strict=True)]
    )
    numbers = [name for name, array in columns.items() if array.dtype.kind in "iu" and name not in text_columns]
    encodings = {name: "DELTA_BINARY_PACKED" for name in numbers if name in DELTA_COLUMNS}
    encodings |= {name: "BYTE_STREAM_SPLIT" for name in columns if name in SPLIT_COLUMNS}
    _write(
        path,
        pa.Table.from_arrays(arrays, schema=schema),
        {
            "use_dictionary": [name for name in columns if name not in encodings],
            "column_encoding": encodings,
            # The smallest and largest text of a dictionary column cost more than all the rest.
            "write_statistics": [name for name in columns if name not in text_columns],
        },
    )
    return path


def _text_columns(schema: Sequence[Column]) -> frozenset[str]:
    """Returns the columns of a table with this schema that are texts, those of its origin included."""
    return ORIGIN_TEXTS.union(column.name for column in schema if column.text)


def _with_texts(numbers: AnyArray, texts: pa.Array) -> pa.DictionaryArray:
    """Returns the texts of these string numbers; missing for numbers below 0."""
    used = np.zeros(len(texts) + 1, np.bool_)
    used[np.maximum(numbers, -1)] = True  # the last place is for "none"
    chosen = np.flatnonzero(used[:-1])
    codes = np.zeros(len(texts) + 1, np.int32)
    codes[chosen] = np.arange(len(chosen), dtype=np.int32)
    none = numbers < 0
    indices = pa.array(codes[np.maximum(numbers, -1)], mask=none if none.any() else None)
    return pa.DictionaryArray.from_arrays(indices, texts.take(pa.array(chosen)))


def _write(path: Path, table: pa.Table, encoding: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        pq.write_table(
            table,
            file,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            dictionary_pagesize_limit=DICTIONARY_BYTES,
            row_group_size=ROW_GROUP_ROWS,
            **encoding,
        )


# ------------------------------------------------------------ reading


def load_columns(directory: Path, fetch: Fetch | None = None) -> Trace:
    """Opens the output of save_columns. Raises SpoolError, also later if a file that is accessed cannot be read.

    fetch: brings a file with this name into the folder if it is not there yet; called before any file but trace.json is
        accessed.
    """
    try:
        values = json.loads((directory / TRACE_FILE).read_bytes())
        version = values["format_version"]
        if version not in READABLE_VERSIONS:
            raise SpoolError(
                f"{directory} is a stored trace in format {version}, but this version reads only "
                f"{' and '.join(map(str, READABLE_VERSIONS))}: use the kinetod that stored it, or record again"
            )
        return _trace(directory, checked_description(values), fetch)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise SpoolError(f"cannot read the stored trace in {directory}: {exc}") from exc


def _trace(directory: Path, values: Mapping[str, Any], fetch: Fetch | None) -> Trace:
    strings: Sequence[str]
    if values["format_version"] == 2:
        strings = tuple(values["strings"])
        files = {kind: _StoredFile(directory / f"{kind}.parquet", None, fetch) for kind in values["tables"]}
        stored = {kind: _StoredTable(kind, file, strings) for kind, file in files.items()}
    else:
        strings = StoredStrings(directory / STRINGS_FILE, **values["strings"], fetch=fetch)
        stored = {
            kind: _StoredTable(kind, _StoredFile(directory / f"{kind}.parquet", entry["bytes"], fetch), strings, entry)
            for kind, entry in values["tables"].items()
        }
    return Trace(
        target=TargetInfo.from_json(json.dumps(values["target"])),
        strings=strings,
        tables=Lazy(stored, lambda kind: stored[kind].table()),
        window_start_ns=values["window_start_ns"],
        window_end_ns=values["window_end_ns"],
        devices=tuple(values["devices"]),
        versions=values["versions"],
        losses=Losses(**values["losses"]),
        sample_period_ns=values["sample_period_ns"],
        head=values.get("head"),
        notes=tuple(values.get("notes", ())),
        coverage=source_coverage.from_json(values.get("coverage")),
        categories=values.get("categories", {}),
    )


class _StoredFile:
    """A file of a stored trace. Its size is checked at once, or when it has been fetched."""

    def __init__(self, path: Path, size: int | None, fetch: Fetch | None) -> None:
        self.place = path
        self._size = size
        self._fetch = fetch
        if fetch is None:
            self._check()

    def path(self) -> Path:
        """Returns the path of the file after fetching it. Raises SpoolError, and what fetching raises."""
        if self._fetch is not None:
            self._fetch(self.place.name)
            self._fetch = None
            self._check()
        return self.place

    def _check(self) -> None:
        found = self.place.stat().st_size
        if self._size not in (None, found):
            raise SpoolError(
                f"{self.place} has {found} bytes, not {self._size}: it was truncated or belongs to another trace"
            )


class StoredStrings(Sequence[str]):
    """The strings of a stored trace, read at the first access. Raises SpoolError then."""

    def __init__(self, path: Path, count: int, bytes: int, fetch: Fetch | None = None) -> None:
        self._file = _StoredFile(path, bytes, fetch)
        self._count = count
        self._array: pa.Array | None = None
        self._list: tuple[str, ...] | None = None

    def arrow(self) -> pa.Array:
        """Returns all strings as an Arrow array of texts, or of bytes if some are not valid Unicode."""
        if self._array is None:
            path = self._file.path()
            with _reading(path):
                file = pq.ParquetFile(path, memory_map=True)
                groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
                require_memory(2 * sum(group.total_byte_size for group in groups), str(path))
                if file.metadata.num_rows != self._count:  # before allocating that length
                    raise SpoolError(f"{path} has {file.metadata.num_rows} strings, not {self._count}")
                array = file.read(columns=["text"])["text"].combine_chunks()
            if len(array) != self._count or array.null_count:
                raise SpoolError(f"{path} has {len(array) - array.null_count} strings, not {self._count}")
            self._array = array
        return self._array

    def _texts(self) -> tuple[str, ...]:
        if self._list is None:
            array = self.arrow()
            try:
                self._list = tuple(
                    value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")
                    for value in array.to_pylist()
                )
            except (ValueError, AttributeError) as exc:
                raise SpoolError(f"cannot read {self._file.place}: {exc}") from exc
        return self._list

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._texts()[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._texts() == tuple(other)

    __hash__ = None  # type: ignore[assignment]


class _StoredTable:
    """The table of one file, which is opened when a column is accessed."""

    def __init__(
        self, kind: str, file: _StoredFile, strings: Sequence[str], described: Mapping[str, Any] | None = None
    ) -> None:
        self._kind = kind
        self._stored = file
        self._place = file.place
        self._strings = strings
        self._file: pq.ParquetFile | None = None
        if described is None:  # missing in format 2
            described = {"rows": self._opened().metadata.num_rows, "columns": self._names(), "origin": {}}
        declared = described.get("declared")
        self._declared: ActivityTable | None = None if declared is None else declared_from_json(kind, declared)
        self._schema = SCHEMAS[kind] if self._declared is None else self._declared.columns
        self._texts = _text_columns(self._schema)
        self._rows: int = described["rows"]
        self._columns = frozenset(described["columns"])
        self._origin = {name: np.dtype(text) for name, text in described["origin"].items()}

    def table(self) -> Table:
        """Returns the table, whose columns are read when they are accessed."""
        types = {column.name: np.dtype(column.dtype) for column in self._schema}
        columns = LazyColumns(list(types), self._rows, lambda name: self._read(name, types[name]))
        origin = LazyColumns(
            list(self._origin), self._rows, lambda name: self._read(ORIGIN_PREFIX + name, self._origin[name])
        )
        return Table(self._kind, columns, origin if self._origin else {}, self._declared)

    def _opened(self) -> pq.ParquetFile:
        if self._file is None:
            path = self._stored.path()
            with _reading(path):
                self._file = pq.ParquetFile(path, memory_map=True)
        return self._file

    def _names(self) -> list[str]:
        """Returns the names of the file's columns. Raises SpoolError."""
        with _reading(self._place):
            return list(self._opened().schema_arrow.names)

    def _read(self, name: str, dtype: np.dtype[Any]) -> AnyArray:
        """Reads one column. Raises SpoolError."""
        file = self._opened()
        if file.metadata.num_rows != self._rows:  # before allocating that length
            raise SpoolError(f"{self._place} has {file.metadata.num_rows} rows, not {self._rows}")
        if name not in self._columns and not name.startswith(ORIGIN_PREFIX):
            return np.full(self._rows, _ABSENT.get(name, 0), dtype)
        require_memory(2 * self._rows * dtype.itemsize, str(self._place))
        with _reading(f"{name} of {self._place}"):
            # One column has no work for several threads, and on a busy machine waiting for them takes long.
            stored = file.read(columns=[name], use_threads=False)[name]
            if pa.types.is_dictionary(stored.type) or pa.types.is_string(stored.type):
                column = self._as_numbers(stored)
            else:
                column = _plain_numbers(stored, dtype)
        if len(column) != self._rows:  # a file may promise more rows than the pages of a column have
            raise SpoolError(f"{name} of {self._place} has {len(column)} values for {self._rows} rows")
        found: AnyArray = column.astype(dtype, copy=False)
        if name in self._texts and len(found) and not -1 <= found.min() <= found.max() < len(self._strings):
            raise SpoolError(f"{self._place}: {name} refers to strings that do not exist")
        return found

    def _as_numbers(self, stored: pa.ChunkedArray) -> AnyArray:
        """Returns the numbers of these texts among the strings of the trace."""
        if not pa.types.is_dictionary(stored.type):
            stored = stored.dictionary_encode()
        if not isinstance(self._strings, StoredStrings):
            raise SpoolError(f"{self._place}: contains string columns, but format 2 stores strings as numbers")
        known = self._strings.arrow()
        parts = []
        texts, numbers = None, np.empty(0, np.int32)
        for chunk in stored.chunks:
            if texts is None or not chunk.dictionary.equals(texts):
                texts = chunk.dictionary
                numbers = np.append(_column(pc.index_in(texts, value_set=known)), np.int32(NO_STRING))
                if (numbers[:-1] < 0).any():
                    raise SpoolError(f"{self._place}: contains strings that are not in the trace's string table")
            codes = _column(chunk.indices)
            if len(codes) and not -1 <= codes.min() <= codes.max() < len(texts):  # Arrow does not check them
                raise SpoolError(f"{self._place}: an index is outside its dictionary of strings")
            parts.append(numbers[codes])
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _plain_numbers(stored: pa.ChunkedArray, dtype: np.dtype[Any]) -> AnyArray:
    """Returns the numbers of a column. Raises ValueError for anything else."""
    kind = stored.type
    is_float = pa.types.is_floating(kind) and dtype.kind == "f"
    if not (pa.types.is_integer(kind) or is_float or pa.types.is_boolean(kind)):
        raise ValueError(f"its values are {kind}, not numbers")
    if stored.null_count:
        raise ValueError(f"{stored.null_count} of its values are missing")
    column: AnyArray = stored.to_numpy()
    return column


def _column(codes: pa.Array) -> AnyArray:
    """Returns Arrow's int32 numbers; missing ones are -1."""
    column: AnyArray = (codes.fill_null(-1) if codes.null_count else codes).to_numpy()
    return column


@contextmanager
def _reading(what: Path | str) -> Iterator[None]:
    """Translates the errors of a damaged file, but not lack of memory. Raises SpoolError."""
    try:
        with memory_errors(str(what)):
            yield
    except MemoryError:
        raise
    except (OSError, KeyError, ValueError, pa.ArrowException) as exc:  # ValueError: a name that is no UTF-8
        raise SpoolError(f"cannot read {what}: {exc}") from exc


def is_stored(path: Path) -> bool:
    """Returns whether this folder has a stored trace of any version; a Chrome trace may be called trace.json too."""
    try:
        with (path / TRACE_FILE).open("rb") as file:
            return file.read(64).lstrip().startswith(b'{"format_version"')
    except OSError:
        return False


# Checks trace.json of a stored trace: it may come from anybody, and its names become paths and sizes. Pure.
def checked_description(values: Any) -> Mapping[str, Any]:
    """Checks that the values have the types that readers rely on. Raises ValueError."""
    _need(isinstance(values, dict), "it is not a JSON object")
    tables = values.get("tables")
    _need(isinstance(tables, (dict, list)), "tables")
    own = {kind for kind, entry in tables.items() if _is_declared(entry)} if isinstance(tables, dict) else set()
    for kind in tables:
        known = isinstance(kind, str) and (kind in SCHEMAS) != (kind in own)
        _need(known, f"unknown kind of activity {kind!r:.80}")
    too_many = f"it declares {len(own)} kinds of activity; at most {MAX_OWN_TABLES} are allowed"
    _need(len(own) <= MAX_OWN_TABLES, too_many)
    if isinstance(tables, dict):
        for kind, entry in tables.items():
            _check_table(f"tables.{kind}", entry)
            if kind in own:
                declared_from_json(kind, entry["declared"])
    _check_numbers(values, "window_start_ns", "window_end_ns", least=-MAX_NUMBER)
    _check_numbers(values, "sample_period_ns")
    _check_texts("notes", values.get("notes", []))
    head = values.get("head")
    _need(head is None or _is_mapping(head, str), "head")
    _need(_is_mapping(values.get("versions"), int), "versions")
    _need(_is_mapping(values.get("losses"), int), "losses")
    categories = values.get("categories", {})
    _need(_is_mapping(categories, str) and all(map(_CATEGORY.fullmatch, categories.values())), "categories")
    devices = values.get("devices")
    _need(isinstance(devices, list) and all(isinstance(device, dict) for device in devices), "devices")
    if isinstance(strings := values.get("strings"), dict):
        _check_numbers(strings, "count", "bytes", path="strings.")
    else:
        _check_texts("strings", strings)  # format 2
    return values  # type: ignore[no-any-return]  # it was found to be a dict


def _is_declared(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("declared") is not None


def _check_table(path: str, entry: Any) -> None:
    _need(isinstance(entry, dict), path)
    _check_numbers(entry, "rows", "bytes", path=f"{path}.")
    columns, origin = entry.get("columns"), entry.get("origin")
    _check_texts(f"{path}.columns", columns)
    _need(_is_mapping(origin, str), f"{path}.origin")
    for name in (*columns, *origin):
        _need(_COLUMN.fullmatch(name) is not None, f"{path}: {name!r:.80} is not a column name")
    for text in origin.values():
        _need(_NUMBERS.fullmatch(text) is not None, f"{path}: {text!r:.80} is not a numeric type")


def _check_numbers(entry: Mapping[str, Any], *names: str, path: str = "", least: int = 0) -> None:
    for name in names:
        value = entry.get(name)
        _need(type(value) is int and least <= value < MAX_NUMBER, f"{path}{name}")


def _check_texts(path: str, texts: Any) -> None:
    _need(isinstance(texts, list) and all(isinstance(text, str) for text in texts), path)


def _is_mapping(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"trace.json: {what}" if " " in what else f"trace.json: {what} has an invalid value")
