"""The report: its views, and how they become one file.

Theory of operation
    All views are computed in one go (run_views), so that each trace is opened once. Views without data in the trace are
    not on the page. Tables have the first rows only, and say so; the page is for reading, not for everything.

    The page is one file that looks like the pages of `kinetoctl web`, from the same templates. Style and script are in
    it, nothing is loaded from anywhere, and a policy lets the browser run these alone, by their hashes: a text of a
    trace that slipped through the escaping would still do nothing.

The first screen is that of all surfaces (catalog/first_screen.py). Of several runs of a program, the page is about the
newest one, and says so.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from kineto_agent import __version__
from markupsafe import Markup

from kineto_trace.analysis.flame_trees import flame_of_rows
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.catalog.first_screen import find_runs, first_requests, first_screen, view_request
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.catalog.view_runner import Paths, Request, run_views, sources_of
from kineto_trace.html.documents import Document
from kineto_trace.html.flame_chart import flame_chart
from kineto_trace.html.templates import environment
from kineto_trace.html.view_charts import document
from kineto_trace.open.trace_discovery import Source
from kineto_trace.view_api.result import Result

MAX_ROWS = 100
# The sections below the first screen, in their order.
SHOWN = (
    "overview",
    "ranks",
    "rank_what_if",
    "rank_waits",
    "step_spread",
    "time_causes",
    "step_breakdown",
    "gpu_summary",
    "idle_causes",
    "gpu_utilization",
    "counter_curves",
    "gpu_clocks",
    "kernels",
    "roofline",
    "operators",
    "python_samples",
    "threads",
    "collective_summary",
    "memory_curve",
    "memory_peak",
    "recommendations",
)
# Not of one rank alone.
VIEWS_OF_SEVERAL = frozenset({"ranks", "rank_what_if", "rank_waits", "step_spread", "time_causes"})
# Views whose tables are thousands of rows.
CHART_ALONE = frozenset({"step_breakdown", "gpu_utilization", "counter_curves", "memory_curve"})
FLAME, LEAST_STACK = "flame_graph", 0.2  # %: stacks with less are one frame
FLAMES = tuple(Request(view=FLAME, options={"of": of, "least": LEAST_STACK}) for of in ("python", "ops"))
FLAME_TITLES = ("Python functions", "Operators and annotations")
EXPLAINED = frozenset({"rank_what_if"})  # without rows, their notes have the reason


def write_report(
    path: str | PathLike[str], sources: Paths | Iterable[Paths], *, executor: Executor | None = None
) -> tuple[int, Sequence[Result]]:
    """Writes the page for these traces (files, folders, patterns or the result of find_traces()).

    Returns its size in bytes, and the results of its first screen.

    Raises FileError if no trace can be read, TraceError if no view works on them, OSError.
    """
    text, results = page(sources_of(sources), executor=executor)
    content = text.encode("utf-8", "replace")
    write_atomically(Path(path), content)
    return len(content), results


def page(sources: Sequence[Source], *, executor: Executor | None = None) -> tuple[str, Sequence[Result]]:
    """Returns the text of the page, of several runs that of the newest one, and the results of its first screen."""
    runs = find_runs(sources, executor=executor)
    sources = sources if runs is None else [runs.newest]
    ranks = len(sources)
    names = [name for name in SHOWN if ranks > 1 or name not in VIEWS_OF_SEVERAL]
    first = first_requests(ranks)
    more = [view_request(name) for name in names if name not in {request.view for request in first}]
    answers = run_views([*first, *more, *FLAMES], sources, executor=executor)
    results = {result.view: result for result in answers[: -len(FLAMES)]}
    screen = first_screen(results.values(), ranks)
    sections = [document(results[name], MAX_ROWS) for name in names]
    templates = environment()
    style, script = (_inline(name) for name in ("style.css", "page.js"))
    text = templates.get_template("report.html").render(
        version=__version__,
        policy=_policy(style, script),
        style=style,
        script=script,
        name=_name(sources),
        traces=[source.path.name for source in sources],
        screen=screen,
        runs=None if runs is None else document(runs.table, MAX_ROWS),
        about_runs="" if runs is None else runs.verdict,
        time=document(screen.time, MAX_ROWS),
        found=document(screen.findings, MAX_ROWS),
        missing=document(screen.missing, MAX_ROWS),
        flames=_flames(answers[-len(FLAMES) :]),
        described={name: _described(name) for name in (*results, FLAME)},
        sections=[section for section in sections if _is_shown(section)],
        chart_alone=CHART_ALONE,
        several=ranks > 1,
    )
    return text, answers[: len(first)]


def _is_shown(section: Document) -> bool:
    """Returns whether there is anything to show, including a failure or the reason why there is no prediction."""
    return bool(section.get("failure") or section["rows"] or section["view"] in EXPLAINED)


def _flames(results: Sequence[Result]) -> list[tuple[str, Markup]]:
    """Returns the flame graphs for which the traces have data, each with its title."""
    graphs = zip(FLAME_TITLES, map(flame_of_rows, results), strict=True)
    return [
        (title, flame_chart(graph[0], name=f"Flame graph: {title}", unit=graph[1]))
        for title, graph in graphs
        if graph is not None
    ]


def _described(name: str) -> dict[str, Any]:
    view = find_view(name)
    return {"description": view.description, "columns": [column._asdict() for column in view.result_columns]}


def _name(sources: Sequence[Source]) -> str:
    """Returns a name for the traces: the file, or for several their common folder."""
    if len(sources) == 1:
        return sources[0].path.name
    folders = {source.path.parent for source in sources}
    folder = folders.pop().name if len(folders) == 1 else ""
    return f"{folder or sources[0].path.name} ({len(sources)} ranks)"


def _inline(name: str) -> str:
    return (files("kineto_trace.html") / "page" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Returns a policy that allows this style and this script, and nothing else."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
