"""The database that SQL over traces runs in: tables made when a query names them, and its limits.

Theory of operation
    Every table of the schema is registered as a LazyTable, so that binding a query costs nothing, and running it
    reads the columns and computes the analyses that it uses. The database is in memory; it can reach no file, network
    or extension, and no SQL can change that. Only queries are run, one at a time.

    DuckDB's own names for errors are kept, with their positions; errors on unknown tables and columns list the existing
    ones.

A table that makes its columns when a query reads them.
    DuckDB asks an Arrow dataset for its schema when a query is bound, and then once per scan for a scanner of the
    columns that the plan needs, with the filters that it pushed down. LazyTable is such a dataset; its scanner calls
    `make` for exactly these columns. DuckDB may name columns in the filter alone, so that these are looked for, too.
    An error in `make` reaches DuckDB as a text; `error` keeps the original.
"""

import gc
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import RLock
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.catalog.view_runner import Paths, opened, sources_of
from kineto_trace.errors import QueryError, TraceError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_discovery import Source, rank_notes
from kineto_trace.sql.arrow_tables import SqlSource, activity_column, constant, event_column, event_counts
from kineto_trace.sql.schema import (
    DEVICES,
    TRACES,
    WHICH,
    SqlTable,
    declared_tables,
    declares,
    sql_tables,
    table_with_rows,
)
from kineto_trace.view_api.result import Result, ResultColumn
from kineto_trace.view_api.result import Type as ResultType
from kineto_trace.view_api.view import View

_SETTINGS = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "python_enable_replacements": "false",
}
_UNKNOWN_TABLE = re.compile(r"Table with name (\S+) does not exist")
_SELECT, _EXPLAIN = duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN  # DESCRIBE, SUMMARIZE, SHOW: SELECTs
_OF_EXPLAIN = re.compile(r"\s*EXPLAIN\s+(?:ANALYZE\s+)?(?:\(\s*(?:ANALYZE|FORMAT)\b[^()]*\)\s*)?", re.IGNORECASE)
_HUGEINT = pa.decimal128(38, 0)
RunView = Callable[[View, Sequence[SqlSource]], Result]
BATCH_ROWS = 1 << 20
Make = Callable[[Sequence[str]], pa.Table]  # from the names of columns, in the order of the schema
ONLY = "trace"  # the name of a trace that was passed open


class LazyTable(ds.Dataset):  # type: ignore[misc]  # pyarrow ships no types
    """A table whose make(names) returns these columns. lock: held during that, since traces are not thread-safe."""

    def __init__(self, schema: pa.Schema, make: Make, lock: RLock) -> None:
        self._own_schema = schema
        self._make = make
        self._lock = lock
        self.error: Exception | None = None

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of all columns."""
        return self._own_schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any) -> Any:
        """Called by DuckDB. columns: None for all."""
        wanted = set(self._own_schema.names if columns is None else columns)
        if filter is not None:
            wanted |= set(re.findall(r"\w+", str(filter)))
        names = [name for name in self._own_schema.names if name in wanted]
        try:
            with self._lock:
                table = self._make(names)
        except Exception as exc:
            self.error = exc
            raise
        options.setdefault("batch_size", BATCH_ROWS)
        return ds.dataset(table).scanner(columns=columns, filter=filter, **options)


def run_view(view: View, sources: Sequence[SqlSource]) -> Result:
    """Returns the result over all ranks; for views without `reduce`, with the name of the trace after the rank."""
    if view.reduce is not None:
        return view.combine([(source.context.rank, view.partial(source.context)) for source in sources])
    results = [view(source.context) for source in sources]
    tables = [
        result.table.add_column(1, "trace", constant(source.name, len(result)))
        for source, result in zip(sources, results, strict=True)
    ]
    notes = tuple(
        note if len(sources) == 1 else f"{source.name}: {note}"
        for source, result in zip(sources, results, strict=True)
        for note in result.notes
    )
    return Result(view.name, view.columns, pa.concat_tables(tables), notes)


class Database:
    """Traces as tables. A context manager; not thread-safe."""

    def __init__(self, sources: Sequence[SqlSource], *, run: RunView = run_view) -> None:
        self._sources = tuple(sources)
        self._run = run
        self._lock = RLock()
        self._results: dict[str, Result] = {}
        self._remarks: list[str] = []  # on the tables that the query reads
        self._failed = False
        self._connection = duckdb.connect(config=dict(_SETTINGS))
        self._connection.execute("SET lock_configuration = true")
        self._tables = sql_tables(declared_tables(source.context.trace for source in self._sources))
        self._lazy = {table.name: self._register(table) for table in self._tables.values()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases everything."""
        self._connection.close()
        self._lazy.clear()
        if self._failed:
            gc.collect()  # DuckDB's bindings complain at exit about relations that an error still references

    def query(self, sql: str) -> Result:
        """Returns the result of one query, in the order that it states. Raises QueryError.

        The notes are those of the analyses in it and of the traces. Columns have DuckDB's types; integers beyond 64
        bits and decimals have the types that Arrow gives them.
        """
        self._results.clear()
        self._remarks.clear()
        self._check(sql)
        try:
            relation = self._connection.sql(sql)  # as a text: errors then show the position
            if relation is None:
                raise QueryError("the statement returns no rows")
            table = _plain(relation.to_arrow_table())
        except duckdb.Error as exc:
            raise self._error(self._placed(exc, sql)) from exc
        notes = [note for result in self._results.values() for note in result.notes]
        notes += self._remarks
        notes += [f"{self._said(source)}{note}" for source in self._sources for note in source.context.trace.remarks]
        columns = tuple(ResultColumn(field.name, _type(field.type), "", "") for field in table.schema)
        return Result("query", columns, table, tuple(dict.fromkeys(notes)))

    def _said(self, source: SqlSource) -> str:
        """Returns the prefix of a note on one of several traces."""
        return f"{source.name}: " if len(self._sources) > 1 else ""

    def _check(self, sql: str) -> None:
        """Rejects everything but a single query, or EXPLAIN of one: EXPLAIN ANALYZE would run it."""
        try:
            found = self._connection.extract_statements(sql)
        except duckdb.Error as exc:
            raise self._error(exc) from exc
        if len(found) != 1:
            raise QueryError(f"expected one SELECT statement, got {len(found)} statements")
        if found[0].type == _EXPLAIN:
            if head := _OF_EXPLAIN.match(sql):
                return self._check(sql[head.end() :])
            raise QueryError(
                "expected EXPLAIN (ANALYZE or options are allowed) and a SELECT statement, without comments"
            )
        if found[0].type != _SELECT:
            raise QueryError(f"expected a SELECT statement, got {found[0].type.name}: traces are read-only")
        return None

    def _placed(self, error: duckdb.Error, sql: str) -> duckdb.Error:
        """Returns the same error with its position, which DuckDB omits when it binds a relation."""
        if isinstance(error, duckdb.BinderException) and "\nLINE " not in str(error):
            try:
                self._connection.execute(sql)
            except duckdb.BinderException as exc:
                return exc
        return error

    def _error(self, error: duckdb.Error) -> TraceError:
        self._failed = True
        for lazy in self._lazy.values():
            cause, lazy.error = lazy.error, None
            if isinstance(cause, TraceError):
                return cause
        text = str(error).strip()
        unknown = _UNKNOWN_TABLE.search(text)
        if unknown is not None:
            position = text.partition("\n\n")[2]
            hint = table_with_rows(unknown[1], (source.context.trace for source in self._sources))
            there = f"no table {unknown[1]!r}; available: {', '.join(self._tables)}"
            return QueryError("\n".join(filter(None, (there, hint, position))))
        return QueryError(text)

    def _register(self, table: SqlTable) -> LazyTable:
        lazy = LazyTable(table.schema, self._maker(table), self._lock)
        self._connection.register(table.name, lazy)
        return lazy

    def _maker(self, table: SqlTable) -> Callable[[Sequence[str]], pa.Table]:
        if table.name in VIEWS:
            return lambda names: self._view_result(table).table.select(list(names))
        if table is TRACES:
            return lambda names: self._small(table, _trace_rows).select(list(names))
        if table is DEVICES:
            return lambda names: self._small(table, _device_rows).select(list(names))
        if table.name == "events":
            return lambda names: self._events(table, names)
        return lambda names: self._activities(table, names)

    def _view_result(self, table: SqlTable) -> Result:
        if table.name not in self._results:
            result = self._run(VIEWS[table.name], self._sources)
            schema = table.schema
            typed = Result(result.view, result.columns, result.table.select(schema.names).cast(schema), result.notes)
            self._results[table.name] = typed
        return self._results[table.name]

    def _small(self, table: SqlTable, rows: Callable[[SqlSource], list[dict[str, Any]]]) -> pa.Table:
        found = [
            {**row, "rank": source.context.rank, "trace": source.name}
            for source in self._sources
            for row in rows(source)
        ]
        return pa.Table.from_pylist(found, schema=table.schema)

    def _activities(self, table: SqlTable, names: Sequence[str]) -> pa.Table:
        parts = [table.schema.empty_table().select(list(names))]
        for source in self._sources:
            if table.name in source.meant.trace.tables:
                count = len(source.meant.trace.table(table.name))
                parts.append(self._part(source, table, names, count, activity_column, table.name))
                self._remark(source, table, names)
        return pa.concat_tables(parts)

    def _remark(self, source: SqlSource, table: SqlTable, names: Sequence[str]) -> None:
        """Adds a note on columns that the trace declares differently from the declaration that counts."""
        declared = source.meant.trace.table(table.name).declared
        if declared is None:
            return
        which = {column.name for column in WHICH}
        asked = [column for column in table.columns if column.name in names and column.name not in which]
        other = [column.name for column in asked if not declares(declared, column.name, column.arrow)]
        if other:
            columns = ", ".join(other)
            self._remarks.append(
                f"{source.name} declares {columns} of {table.name} differently or not at all, so its rows lack them"
            )

    def _events(self, table: SqlTable, names: Sequence[str]) -> pa.Table:
        parts = [table.schema.empty_table().select(list(names))]
        for source in self._sources:
            for kind, count in event_counts(source.meant).items():
                parts.append(self._part(source, table, names, count, event_column, kind))
        return pa.concat_tables(parts)

    def _part(
        self,
        source: SqlSource,
        table: SqlTable,
        names: Sequence[str],
        count: int,
        column: Callable[[Any, str, str, pa.DataType], pa.Array],
        kind: str,
    ) -> pa.Table:
        fields = {field.name: field for field in table.columns}
        arrays: Mapping[str, pa.Array] = {
            name: pa.repeat(source.context.rank, count).cast(pa.int64())
            if name == "rank"
            else constant(source.name, count)
            if name == "trace"
            else column(source.meant, kind, name, fields[name].arrow)
            for name in names
        }
        return pa.table(arrays, schema=pa.schema([pa.field(name, fields[name].arrow) for name in names]))


def _trace_rows(source: SqlSource) -> list[dict[str, Any]]:
    trace = source.context.trace
    return [
        {
            "host": trace.target.host,
            "pid": trace.target.pid,
            "process_name": trace.target.process_name,
            "framework": trace.target.framework,
            "world_size": trace.target.world_size,
            "window_start_ns": trace.window_start_ns,
            "window_end_ns": trace.window_end_ns,
            "activities": sum(event_counts(source.meant).values()),
            "notes": list(trace.notes),
        }
    ]


def _device_rows(source: SqlSource) -> list[dict[str, Any]]:
    def whole(value: Any) -> int | None:
        return value if isinstance(value, int) else None

    return [
        {
            "device": whole(device.get("id")),
            "name": str(device["name"]) if "name" in device else None,
            "memory_bytes": whole(device.get("totalGlobalMem")),
            "compute_major": whole(device.get("computeMajor")),
            "compute_minor": whole(device.get("computeMinor")),
            "multiprocessors": whole(device.get("numSms")),
            "properties": json.dumps(dict(device)),
        }
        for device in source.context.trace.devices
    ]


def _plain(table: pa.Table) -> pa.Table:
    """Narrows sums of integers, which DuckDB makes 128 bits wide, to 64 bits where they fit, and makes names unique."""
    table = table.rename_columns(_unique(table.column_names))
    for place, field in enumerate(table.schema):
        if field.type == _HUGEINT:
            try:
                table = table.set_column(place, field.name, pc.cast(table.column(place), pa.int64()))
            except pa.ArrowInvalid:
                continue  # too large
    return table


def _unique(names: Sequence[str]) -> list[str]:
    """Adds numbers to repeated names: a, a_1, …"""
    found: dict[str, None] = {}
    for name in names:
        number = 0
        candidate = name
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found[candidate] = None
    return list(found)


def _type(arrow: pa.DataType) -> ResultType:
    if pa.types.is_integer(arrow) or arrow == _HUGEINT:
        return "int"
    if pa.types.is_floating(arrow) or pa.types.is_decimal(arrow):
        return "float"
    if pa.types.is_boolean(arrow):
        return "bool"
    if pa.types.is_list(arrow):
        return "ints" if pa.types.is_integer(arrow.value_type) else "texts"
    return "text"


def query(sql: str, sources: Paths | Context | Trace | Iterable[Paths]) -> Result:
    """Returns the result of one SELECT in DuckDB's dialect over one or many traces.

    `kinetoctl query --schema` lists the tables.

    sources: an open trace or its context; or paths (files, folders, patterns); or the result of find_traces(). All of
        them are open at the same time.

    A query can read the tables of these traces only: no files and no network. Columns have no units except in their
        names. Raises QueryError for SQL that cannot be run, FileError if a trace cannot be read, TraceError if a view
        fails.
    """
    if isinstance(sources, (Context, Trace)):
        context = sources if isinstance(sources, Context) else Context(sources)
        with Database([SqlSource(ONLY, context)]) as database:
            return database.query(sql)
    found = sources_of(sources)
    with ExitStack() as stack:
        contexts = [Context(opened(source, stack), rank=source.rank, worker=source.worker) for source in found]
        named = [SqlSource(name, context) for name, context in zip(source_names(found), contexts, strict=True)]
        result = stack.enter_context(Database(named)).query(sql)
    return replace(result, notes=(*rank_notes(found), *result.notes))


def source_names(sources: Sequence[Source]) -> list[str]:
    """Returns a short, unique name for each: its file name with as many parent folders as it takes."""
    parts = [source.path.parts for source in sources]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(source.path) for source in sources]
