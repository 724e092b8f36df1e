"""The report: its views, and how they become one file.

Theory of operation
    All views are computed in one go (run_views), so that each trace is opened once. Views without data in the trace are
    not on the page. Tables have the first rows only, and say so; the page is for reading, not for everything.

    The page is one file that looks like the pages of `kinetoctl web`, from the same templates. Style and script are in
    it, nothing is loaded from anywhere, and a policy lets the browser run these alone, by their hashes: a text of a
    trace that slipped through the escaping would still do nothing.

The first screen, in the report and on the web page, shows where the time goes, what to change, and what is missing.

For several ranks the findings are those of the job, each once, as `kinetoctl report` prints them.
"""

import base64
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

from kineto_agent import __version__
from markupsafe import Markup

from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.analysis.flame_trees import flame_of_rows
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.base.quantities import format_duration, format_ranges, times
from kineto_trace.base.visible_text import one_line
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.catalog.view_runner import Paths, Request, run_views
from kineto_trace.html.documents import Document
from kineto_trace.html.flame_chart import flame_chart
from kineto_trace.html.templates import environment
from kineto_trace.html.view_charts import document
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
# Not of one rank alone.
VIEWS_OF_SEVERAL = frozenset({"ranks", "rank_what_if", "rank_waits", "step_spread", "time_causes"})
# Views whose tables are thousands of rows.
CHART_ALONE = frozenset({"step_breakdown", "gpu_utilization", "counter_curves", "memory_curve"})
FLAME, LEAST_STACK = "flame_graph", 0.2  # %: stacks with less are one frame
FLAMES = tuple(Request(view=FLAME, options={"of": of, "least": LEAST_STACK}) for of in ("python", "ops"))
FLAME_TITLES = ("Python functions", "Operators and annotations")
EXPLAINED = frozenset({"rank_what_if"})  # without rows, their notes have the reason
LEAST_SHARE = 1.0  # %: causes with less are one row
MAX_VALUES = 4  # of a fact that differs from rank to rank
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALWAYS = ("recordings", "overview", "not_recorded", "findings")
# Views of the first screen that need several ranks.
OF_SEVERAL = ("rank_time_causes", "rank_what_if")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstScreen:
    """facts: (name, value) of the recording. lead: how long a step takes. time: shares of the time."""

    facts: Sequence[tuple[str, str]]
    lead: str
    time: Result
    findings: Result
    missing: Result


def write_report(
    path: str | PathLike[str], sources: Paths | Iterable[Paths], *, executor: Executor | None = None
) -> int:
    """Writes the page for these traces (files, folders, patterns or the result of find_traces()). Returns its size.

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
    names = [name for name in SHOWN if ranks > 1 or name not in VIEWS_OF_SEVERAL]
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


def _name(sources: Sequence[Paths]) -> str:
    """Returns a name for the traces: the file, or for several their common folder."""
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
    """Returns a policy that allows this style and this script, and nothing else."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def first_requests(ranks: int) -> list[Request]:
    """Returns the views for the first screen of a job of so many ranks."""
    time = OF_SEVERAL if ranks > 1 else ("time_causes",)
    return [view_request(name) for name in (*_ALWAYS, *time)]


def view_request(name: str) -> Request:
    """Requests the view as pages show it: causes with less than 1 % are merged."""
    return Request(view=name, options={"least": LEAST_SHARE} if name.endswith("time_causes") else {})


def first_screen(results: Collection[Result], traces: int) -> FirstScreen:
    """Makes the first screen from the results of first_requests() for so many traces."""
    by_name = {result.view: result for result in results}
    findings, recordings = by_name["findings"], by_name["recordings"].rows()
    ranks = traces - (len(recordings) - len({row["rank"] for row in recordings}))  # some may have several captures
    if traces > 1 and not findings.failure:
        findings = common_findings(findings, ranks, by_name["rank_what_if"], traces=traces)
    return FirstScreen(
        facts=_facts(recordings, ranks),
        lead=_lead(by_name["overview"].rows(), traces, ranks),
        time=_cause_first(by_name["rank_time_causes" if traces > 1 else "time_causes"]),
        findings=findings,
        missing=by_name["not_recorded"],
    )


def _cause_first(result: Result) -> Result:
    """Returns the result with the chart's name of a cause in the first column."""
    columns = sorted(result.columns, key=lambda column: column.name != "cause")
    return replace(result, columns=tuple(columns), table=result.table.select([column.name for column in columns]))


def _lead(rows: Sequence[Mapping[str, Any]], traces: int, ranks: int) -> str:
    steps = [row["step_us"] for row in rows if row["step_us"] is not None and row["steps"]]
    if not steps:
        return ""
    count = times(max(row["steps"] for row in rows if row["steps"]), "step")
    several = f"on each of {ranks} ranks" if traces == ranks else f"in each of {traces} captures"
    where = f" {several}" if traces > 1 else ""
    return f"A step takes {format_duration(1000 * fmean(steps))} on average ({count}{where})."


def _facts(rows: Sequence[Mapping[str, Any]], ranks: int) -> list[tuple[str, str]]:
    """Returns names and values, without those that no trace has."""
    world = max((row["world_size"] or 0 for row in rows), default=0)
    told = [
        ("job", _joined(row["job"] for row in rows)),
        ("labels", _joined(label for row in rows for label in row["labels"] or ())),
        ("command", _joined(row["command"] for row in rows)),
        ("process", _process(rows)),
        ("host", _joined(row["host"] for row in rows)),
        ("GPU", _joined(_gpus(row["gpus"] or ()) for row in rows)),
        ("ranks", f"{ranks} of {world}" if world > ranks else str(ranks) if ranks > 1 else ""),
        ("rank", str(rows[0]["rank"]) if ranks == 1 and world > 1 and rows else ""),
        ("recorded", _moment(min((row["start_ns"] for row in rows if row["start_ns"]), default=0))),
        ("window", _window([row["length_us"] for row in rows if row["length_us"]])),
        ("framework", _joined(row["framework"] for row in rows)),
        ("Python", _joined(row["python"] for row in rows)),
        ("CUDA", _joined(row["cuda"] for row in rows)),
        ("driver", _joined(f"knows CUDA {row['driver_cuda']}" if row["driver_cuda"] else "" for row in rows)),
        ("CUPTI", _joined(row["cupti"] for row in rows)),
        ("written by", _joined(f"kinetod {row['kinetod']}" if row["kinetod"] else "" for row in rows)),
        ("capture", _joined(row["capture"] for row in rows)),
    ]
    return [(name, text) for name, text in told if text]


def _joined(values: Any) -> str:
    """Returns the different values; the first ones if there are many."""
    found = list(dict.fromkeys(one_line(value) for value in values if value))
    more = len(found) - MAX_VALUES
    return ", ".join(found[:MAX_VALUES]) + (f" and {more} more" if more > 0 else "")


def _process(rows: Sequence[Mapping[str, Any]]) -> str:
    name, pids = _joined(row["process"] for row in rows), sorted({row["pid"] for row in rows if row["pid"]})
    several = f"pids {format_ranges(pids)}" if len(pids) > 1 else f"pid {pids[0]}" if pids else ""
    return f"{name} ({several})" if name and several else name or several


def _window(lengths_us: Sequence[float]) -> str:
    ends = (min(lengths_us), max(lengths_us)) if lengths_us else ()
    return " to ".join(dict.fromkeys(format_duration(1000 * length) for length in ends))


def _gpus(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} {name}" if names.count(name) > 1 else name for name in kinds)


def _moment(unix_ns: int) -> str:
    """Formats local time, and UTC if that differs."""
    if unix_ns <= 0:
        return ""
    try:
        utc = _EPOCH + timedelta(microseconds=unix_ns // 1000)
        local = utc.astimezone()
    except (OverflowError, OSError, ValueError):
        return ""
    shown = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    return shown if not local.utcoffset() else f"{local:%Y-%m-%d %H:%M:%S %Z} ({shown})"
