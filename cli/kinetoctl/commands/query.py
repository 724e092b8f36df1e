"""`kinetoctl query`: SQL over traces."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, current, table_options
from kinetoctl.errors import trace_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import CAPTURE_ID, found_traces, traces_argument
from kinetoctl.output.console import emit, print_table, say_text

if TYPE_CHECKING:
    from kineto_trace.model.activity_tables import ActivityTable
    from kineto_trace.sql.schema import SqlTable

TABLES = ("TABLE", "COLUMNS", "WHAT IT HOLDS")
COLUMNS = ("COLUMN", "TYPE", "UNIT", "MEANING")


@click.command("query")
@click.argument("sql", metavar="SQL", required=False)
@traces_argument
@click.option(
    "--schema",
    metavar="[TABLE]",
    is_flag=False,
    flag_value="",
    help="List the tables, or the columns of one table, instead of running a query; with traces, include "
    "tables that only they have.",
)
@click.option("--limit", metavar="N", type=click.IntRange(0), default=0, help="Rows to show; 0 for all.  [default: 0]")
@table_options
def command(sql: str | None, traces: tuple[str, ...], schema: str | None, limit: int) -> int:
    """Query traces in SQL (DuckDB's dialect).

    \b
    kinetoctl query 'SELECT name, sum(duration_ns) FROM kernel GROUP BY 1 ORDER BY 2 DESC' trace.json.gz
    kinetoctl query "SELECT args->>'Collective name', count(*) FROM kernel GROUP BY 1" 'rank*.json'
    kinetoctl query --schema
    kinetoctl query --schema kernel
    kinetoctl query --schema npu_wait CAPTURE

    There is a table for each kind of activity (kernel, cpu_op, …; `events` has all of them), one for the traces
    themselves, and one for each view of `kinetoctl report`, which is computed when a query uses it. Captures of a
    vendor's accelerator may have tables of their own. A table holds the rows of all traces; the columns rank and trace
    tell them apart. SQL can access nothing else: no files, no network.
    """
    settings = current()
    if schema is not None:
        return _schema(schema, (sql, *traces) if sql is not None else (), settings)
    if sql is None:
        raise click.UsageError("give a query and a trace; `kinetoctl query --schema` lists the tables")
    _check_order(sql, traces)
    with found_traces(traces, settings) as sources, trace_errors():
        from kineto_trace.sql.database import query

        result = query(sql, sources)
    from kinetoctl.output.result_tables import save_results, show_result

    if settings.file is not None:
        save_results({"query": result}, settings, limit=limit, named=False)
    else:
        show_result(result, settings, limit=limit)
    return ExitCode.DONE


def _check_order(sql: str, traces: tuple[str, ...]) -> None:
    """Raises UsageError if a trace stands where the query belongs."""
    if not (Path(sql).exists() or CAPTURE_ID.fullmatch(sql)):
        return
    query = next((text for text in traces if " " in text and not Path(text).exists()), "SELECT …")
    rest = [sql, *(text for text in traces if text != query)]
    raise click.UsageError(
        f"the query must come first, but {sql} is a trace; write: kinetoctl query {shlex.join([query, *rest])}"
    )


def _schema(table: str, traces: tuple[str, ...], settings: CommonOptions) -> int:
    """Shows the tables. traces: may have tables of their own; (): none."""
    with trace_errors():
        declared = _declared(traces, settings) if traces else []
        if table:
            show_table(table, declared, settings)
        else:
            show_tables(declared, settings)
    return ExitCode.DONE


def _declared(traces: tuple[str, ...], settings: CommonOptions) -> "list[ActivityTable]":
    """Returns the tables that the traces declare themselves."""
    from contextlib import ExitStack

    from kineto_trace.catalog.view_runner import opened, sources_of
    from kineto_trace.sql.schema import declared_tables

    with found_traces(traces, settings) as sources, ExitStack() as stack:
        return declared_tables(opened(source, stack) for source in sources_of(sources))


def show_tables(declared: Sequence["ActivityTable"], settings: CommonOptions) -> None:
    """Prints all tables, one per line; for programs, with their columns. declared: those of traces themselves."""
    from kineto_trace.sql.schema import sql_tables

    tables = sql_tables(declared).values()
    if settings.output == "table":
        rows = [(table.name, str(len(table.columns)), table.summary) for table in tables]
        print_table(TABLES, rows, color=settings.color)
        say_text("`kinetoctl query --schema TABLE` describes the columns of a table")
    else:
        emit([_document(table) for table in tables], settings.output)


def show_table(name: str, declared: Sequence["ActivityTable"], settings: CommonOptions) -> None:
    """Prints the description and columns of one table. Raises QueryError."""
    from kineto_trace.sql.schema import find_table

    table = find_table(name, declared)
    if settings.output != "table":
        emit(_document(table), settings.output)
        return
    say_text(f"{table.name}\n\n{table.description}\n")
    rows = [(column.name, column.type, column.unit or "-", column.meaning) for column in table.columns]
    print_table(COLUMNS, rows, color=settings.color)


def _document(table: "SqlTable") -> dict[str, Any]:
    columns = [
        {"name": column.name, "type": column.type, "unit": column.unit, "meaning": column.meaning}
        for column in table.columns
    ]
    return {"name": table.name, "group": table.group, "description": table.description, "columns": columns}
