"""`kinetoctl query`: SQL over traces."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kinetoctl.base.common_options import CommonOptions, current, table_options
from kinetoctl.client.file_errors import trace_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import CAPTURE_ID, found_traces, traces_argument

if TYPE_CHECKING:
    from kineto_trace.model.activity_table import ActivityTable


@click.command("query")
@click.argument("sql", metavar="SQL", required=False)
@traces_argument
@click.option(
    "--schema",
    metavar="[TABLE]",
    is_flag=False,
    flag_value="",
    help="List the tables, or the columns of one table, instead of running a query; with traces, also their own.",
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

    There is a table for each kind of activity (kernel, cpu_op, …; `events` has all), one of the traces themselves, and
    one for every view of `kinetoctl report`, which is computed when a query names it. Captures of a
    vendor's accelerator may have tables of their own. A table holds the rows of all traces; the columns rank and trace
    tell them apart. SQL can read nothing else: no files, no network.
    """
    settings = current()
    if schema is not None:
        return _schema(schema, (sql, *traces) if sql is not None else (), settings)
    if sql is None:
        raise click.UsageError("give a query and a trace; `kinetoctl query --schema` lists the tables")
    _check_order(sql, traces)
    with found_traces(traces, settings) as sources, trace_errors():
        from kineto_trace.sql.trace_queries import query

        result = query(sql, sources)
    if settings.file is not None:
        from kinetoctl.output.result_files import save_results

        save_results({"query": result}, settings, limit=limit, named=False)
    else:
        from kinetoctl.output.result_tables import show_result

        show_result(result, settings, limit=limit)
    return ExitCode.DONE


def _check_order(sql: str, traces: tuple[str, ...]) -> None:
    """Raises UsageError if a trace stands where the query belongs."""
    if not (Path(sql).exists() or CAPTURE_ID.fullmatch(sql)):
        return
    query = next((text for text in traces if " " in text and not Path(text).exists()), "SELECT …")
    rest = [sql, *(text for text in traces if text != query)]
    raise click.UsageError(
        f"the query comes first, and {sql} is a trace; write: kinetoctl query {shlex.join([query, *rest])}"
    )


def _schema(table: str, traces: tuple[str, ...], settings: CommonOptions) -> int:
    """Shows the tables. traces: may have tables of their own; (): none."""
    from kinetoctl.output.sql_schema import show_table, show_tables

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
