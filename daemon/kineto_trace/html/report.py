"""The report: which views are on it, and how it becomes one file.

Theory of operation
    All views are computed in one go (run_views), so that each trace is opened once. What a trace has nothing of is not
    on the page. Tables have the first rows only, and say so; the page is for reading, not for everything.

    The page is one file that looks like the pages of `kinetoctl web`, from the same templates. Style and script are in
    it, nothing is loaded from anywhere, and a policy lets the browser run these alone, by their hashes: a text of a
    trace that slipped through the escaping would still do nothing.
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

from kineto_trace.analysis.flame.flame_rows import flame_of_rows
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.catalog.view_runner import Paths, Request, run_views
from kineto_trace.html.documents import Document
from kineto_trace.html.first_screen import first_requests, first_screen, view_request
from kineto_trace.html.flame_chart import flame_chart
from kineto_trace.html.result_documents import document
from kineto_trace.html.templates import environment
from kineto_trace.open.trace_discovery import Source, find_traces
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
OF_SEVERAL = frozenset({"ranks", "rank_what_if", "rank_waits", "step_spread", "time_causes"})  # not of one rank alone
CHART_ALONE = frozenset(
    {"step_breakdown", "gpu_utilization", "counter_curves", "memory_curve"}
)  # whose tables are thousands of rows
FLAME, LEAST_STACK = "flame_graph", 0.2  # %: stacks with less are one frame
FLAMES = tuple(Request(view=FLAME, options={"of": of, "least": LEAST_STACK}) for of in ("python", "ops"))
FLAME_TITLES = ("Python functions", "Operators and annotations")
EXPLAINED = frozenset({"rank_what_if"})  # without rows, their notes say why


def write_report(
    path: str | PathLike[str], sources: Paths | Iterable[Paths], *, executor: Executor | None = None
) -> int:
    """Writes the page for these traces (files, folders, patterns or what find_traces() has found). Returns its size.

    Raises FileError if no trace can be read, TraceError if no view works on them, OSError.
    """
    found = find_traces(sources) if isinstance(sources, (str, PathLike)) else sources
    listed = list(found) if not isinstance(found, Source) else [found]
    text = page(listed, executor=executor).encode("utf-8", "replace")
    write_atomically(Path(path), text)
    return len(text)


def page(sources: Sequence[Paths], *, executor: Executor | None = None) -> str:
    """Returns the text of the page."""
    ranks = len(sources)
    names = [name for name in SHOWN if ranks > 1 or name not in OF_SEVERAL]
    first = first_requests(ranks)
    more = [view_request(name) for name in names if name not in {request.view for request in first}]
    answers = run_views([*first, *more, *FLAMES], sources, executor=executor)
    results = {result.view: result for result in answers[: -len(FLAMES)]}
    screen = first_screen(results.values(), ranks)
    sections = [document(results[name], MAX_ROWS) for name in names]
    templates = environment()
    style, script = (_inline(name) for name in ("style.css", "page.js"))
    return templates.get_template("report.html").render(
        version=__version__,
        policy=_policy(style, script),
        style=style,
        script=script,
        name=_name(sources),
        traces=[_trace_name(source) for source in sources],
        screen=screen,
        time=document(screen.time, MAX_ROWS),
        found=document(screen.findings, MAX_ROWS),
        missing=document(screen.missing, MAX_ROWS),
        flames=_flames(answers[-len(FLAMES) :]),
        described={name: _described(name) for name in (*results, FLAME)},
        sections=[section for section in sections if _is_shown(section)],
        chart_alone=CHART_ALONE,
        several=ranks > 1,
    )


def _is_shown(section: Document) -> bool:
    """Tells whether there is anything to show, be it that the view failed, or why it predicts nothing."""
    return bool(section.get("failure") or section["rows"] or section["view"] in EXPLAINED)


def _flames(results: Sequence[Result]) -> list[tuple[str, Markup]]:
    """The flame graphs that the traces have something for, each with its title."""
    found = []
    for result, title in zip(results, FLAME_TITLES, strict=True):
        graph = flame_of_rows(result)
        if graph is not None:
            root, unit = graph
            found.append((title, flame_chart(root, name=f"Flame graph: {title}", unit=unit)))
    return found


def _described(name: str) -> dict[str, Any]:
    view = find_view(name)
    return {"description": view.description, "columns": [column._asdict() for column in view.result_columns]}


def _name(sources: Sequence[Paths]) -> str:
    """What the traces are called: the file, or of several the folder that they are in."""
    if len(sources) == 1:
        return _trace_name(sources[0])
    folders = {_path(source).parent for source in sources}
    folder = folders.pop().name if len(folders) == 1 else ""
    return f"{folder or _trace_name(sources[0])} ({len(sources)} ranks)"


def _trace_name(source: Paths) -> str:
    return _path(source).name


def _path(source: Paths) -> Path:
    return Path(source.path if isinstance(source, Source) else source)


def _inline(name: str) -> str:
    return (files("kineto_trace.html") / "page" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Allows this style and this script, and nothing else."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
