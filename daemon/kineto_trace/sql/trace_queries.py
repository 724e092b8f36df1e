"""One query over traces that may still have to be opened."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kineto_trace.catalog.view_runner import Paths, opened, sources_of
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_discovery import Source, rank_notes
from kineto_trace.sql.arrow_tables import SqlSource
from kineto_trace.sql.database import Database
from kineto_trace.view_api.result import Result

ONLY = "trace"  # the name of a trace that was given open


def query(sql: str, sources: Paths | Context | Trace | Iterable[Paths]) -> Result:
    """Returns the result of one SELECT in DuckDB's dialect over one or many traces; docs/views.md lists the tables.

    sources: an open trace or its context; or paths (files, folders, patterns); or what find_traces() has found. All of
    them are open at the same time. A query can read the tables of these traces only: no files and no network. Columns
    have no units but those that their names say.

    Raises QueryError for SQL that cannot be run, FileError if a trace cannot be read, TraceError if a view fails.
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
