"""`kinetoctl query`: SQL over traces."""

import click

from kinetoctl.base.common_options import CommonOptions, current, table_options
from kinetoctl.client.file_errors import trace_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import found_traces, traces_argument


@click.command("query")
@click.argument("sql", metavar="SQL", required=False)
@traces_argument
@click.option(
    "--schema",
    metavar="[TABLE]",
    is_flag=False,
    flag_value="",
    help="List the tables, or the columns of one table, instead of running a query.",
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

    There is a table for each kind of activity (kernel, cpu_op, …; `events` has all), one of the traces themselves, and
    one for every view of `kinetoctl report`, which is computed when a query names it. A table holds the rows of all
    traces; the columns rank and trace tell them apart. SQL can read nothing else: no files, no network.
    """
    settings = current()
    if schema is not None:
        return _schema(schema, settings)
    if sql is None:
        raise click.UsageError("give a query and a trace; `kinetoctl query --schema` lists the tables")
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


def _schema(table: str, settings: CommonOptions) -> int:
    from kinetoctl.output.sql_schema import show_table, show_tables

    with trace_errors():
        if table:
            show_table(table, settings)
        else:
            show_tables(settings)
    return ExitCode.DONE
