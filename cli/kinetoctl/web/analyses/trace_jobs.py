"""What a worker can do with traces: name the views, compute them, compare two traces, run SQL, export for the timeline.

Every answer is a plain value for JSON. Open traces are kept, the most recent ones only, so that the second view of a
trace does not read it again.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kineto_trace.analysis.diff.diff_views import compare_jobs
from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.catalog.view_catalog import VIEWS, find_view
from kineto_trace.catalog.view_runner import failed_result
from kineto_trace.errors import FileError
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.html.view_charts import chart
from kineto_trace.model.context import Context
from kineto_trace.open.trace_discovery import Source, find_traces, rank_notes
from kineto_trace.open.trace_opener import Form, detect, open_trace
from kineto_trace.sql import Database
from kineto_trace.sql.arrow_tables import SqlSource
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View

from kinetoctl.base.view_settings import options_of, type_text
from kinetoctl.client.result_rows import plain_rows
from kinetoctl.errors import NotFound
from kinetoctl.web.analyses.flame_job import FlameOrder, flame_request, flame_values

MAX_OPEN = 8  # ranks
MAX_ROWS = 20_000  # of one result
DIFF, STEP = "diff_", "step"


class TraceJobs:
    """The jobs, by name, and the open traces."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, int], Context] = OrderedDict()
        self._jobs: Mapping[str, Callable[..., Any]] = {
            "catalog": self.catalog,
            "ranks": self.ranks,
            "views": self.views,
            "query": self.query,
            "timeline": self.timeline,
            "flame": self.flame,
        }

    def run(self, job: Mapping[str, Any]) -> Any:
        """Runs a job: its name as `job`, and its arguments. Raises TraceError, CliError."""
        return self._jobs[job["job"]](**{name: value for name, value in job.items() if name != "job"})

    def forget(self) -> None:
        """Closes all traces."""
        self._open.clear()

    def catalog(self) -> list[dict[str, Any]]:
        """Every view with what it says, its options and its columns."""
        return [_described(view) for view in VIEWS.values()]

    def ranks(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """The traces at these paths."""
        return [{"rank": source.rank, "name": source.path.name} for source in find_traces(*paths)]

    def views(
        self,
        names: Sequence[str],
        paths: Sequence[str],
        base: Sequence[str] = (),
        rank: int | None = None,
        step: str = "",
        settings: Sequence[tuple[str, str]] = (),
        limit: int = MAX_ROWS,
    ) -> list[dict[str, Any]]:
        """Each view's result. base: the traces to compare with; rank and step: the only ones of interest."""
        views = [find_view(name) for name in names]
        options = options_of(views, [(key, text) for key, text in settings])
        sources = self._sources(paths, rank)
        before = self._sources(base, None) if base else []
        results = []
        for view in views:
            try:
                results.append(self._result(view, sources, before, options[view.name]))
            except Exception as exc:
                if len(views) == 1:
                    raise
                results.append(failed_result(view, str(exc)))
        findings = next((result for result in results if result.view == "findings"), None)
        if findings is not None and len(sources) > 1 and not findings.failure:
            results[results.index(findings)] = common_findings(findings, len(sources), None)
        return [_document(result, step, limit) for result in results]

    def query(self, sql: str, paths: Sequence[str], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
        """The result of one query over the traces."""
        sources = self._sources(paths, None)
        opened = [SqlSource(source.path.name, self._context(source)) for source in sources]
        with Database(opened) as database:
            return [_document(database.query(sql), "", limit)]

    def timeline(self, paths: Sequence[str], rank: int | None, target: str) -> dict[str, Any]:
        """Writes the trace of one rank for the timeline. Returns the path of the file."""
        source = self._sources(paths, rank)[0]
        if detect(source.path) in (Form.CHROME, Form.PERFETTO):
            return {"path": str(source.path)}
        export_trace(self._context(source).trace, Path(target), "chrome")
        return {"path": target}

    def flame(
        self,
        paths: Sequence[str],
        base: Sequence[str] = (),
        rank: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """A flame graph for its page. base: the traces to compare with; fields: those of flame_request."""
        request = flame_request(**fields)
        sources = self._sources(paths, rank)
        sources = sources[:1] if request.order is FlameOrder.TIME else sources
        before = self._sources(base, None) if base else []
        before = self._sources(base, rank) if len(before) > 1 else before
        return flame_values(request, map(self._context, sources), map(self._context, before))

    def _sources(self, paths: Sequence[str], rank: int | None) -> list[Source]:
        found = find_traces(*paths)
        chosen = [source for source in found if rank is None or source.rank == rank]
        if not chosen:
            raise NotFound(
                f"there is no trace of rank {rank}; there are: {', '.join(str(each.rank) for each in found)}"
            )
        return chosen

    def _context(self, source: Source) -> Context:
        key = str(source.path), source.rank
        context = self._open.pop(key, None)
        if context is None:
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)
            context = Context(open_trace(source.path), rank=source.rank, worker=source.worker)
        self._open[key] = context
        return context

    def _result(
        self, view: View, sources: Sequence[Source], base: Sequence[Source], options: Mapping[str, Any]
    ) -> Result:
        if view.name.startswith(DIFF):
            return self._compared(view, base, sources, options)
        partials, notes = [], rank_notes(sources)
        for source in sources:
            context = self._context(source)
            partials.append((source.rank, view.packed(view.partial(context, **options))))
            said = context.trace.remarks
            notes += said if len(sources) == 1 else [f"rank {source.rank}: {note}" for note in said]
        result = view.combine(partials, **options)
        return replace(result, notes=tuple(dict.fromkeys((*result.notes, *notes))))

    def _compared(
        self, view: View, base: Sequence[Source], sources: Sequence[Source], options: Mapping[str, Any]
    ) -> Result:
        if not base:
            raise FileError(f"view {view.name} compares two traces: choose a baseline")
        if len(base) == len(sources) == 1:
            pairs = [(base[0], sources[0])]
        else:
            others = {source.rank: source for source in sources}
            pairs = [(source, others[source.rank]) for source in base if source.rank in others]
        if not pairs:
            raise NotFound("the two jobs have no rank in common")
        before, after = (
            [view.partial(self._context(each), **options) for each in side] for side in zip(*pairs, strict=True)
        )
        if len(pairs) == 1:
            return view.combine([(0, before[0]), (1, after[0])], **options)
        return compare_jobs(view, before, after)


def _described(view: View) -> dict[str, Any]:
    return {
        "name": view.name,
        "description": view.description,
        "options": [
            {"name": name, "type": type_text(view.option_type(name)), "default": _text(default)}
            for name, default in view.options.items()
        ],
        "columns": [column._asdict() for column in view.result_columns],
    }


def _text(value: Any) -> str:
    """A default as `--set` takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _document(result: Result, step: str, limit: int) -> dict[str, Any]:
    """A result as a plain value; `rows` are lists in the order of the columns, `chart` is SVG."""
    names = [column.name for column in result.columns]
    steps = list(dict.fromkeys(map(str, result.values(STEP)))) if STEP in names else []
    if step and STEP in names:
        kept = [place for place, value in enumerate(result.values(STEP)) if str(value) == step]
        result = replace(result, table=result.table.take(kept))
    shown = replace(result, table=result.table.slice(0, limit))
    return {
        "view": result.view,
        "columns": [column._asdict() for column in result.columns],
        "rows": [list(row.values()) for row in plain_rows(shown)],
        "total": len(result),
        "notes": list(result.notes),
        "failure": result.failure,
        "steps": steps,
        "chart": str(chart(result)) if not result.failure else "",
    }
