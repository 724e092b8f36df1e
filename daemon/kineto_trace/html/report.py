"""The page: which views are on it, and how each is shown.

Theory of operation
    All views are computed in one go (run_views), so that each trace is opened once. What a trace has nothing of is not
    on the page. Tables have the first rows only, and say so; the page is for reading, not for everything.

    The page is one file: style and script are in it, and nothing is loaded from anywhere.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from kineto_agent import __version__
from markupsafe import Markup

from kineto_trace.analysis.causes.cause_views import OTHERS
from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.analysis.idle.idle_gaps import CAUSES
from kineto_trace.analysis.overview.step_breakdown import OTHER, ROLES, UNRECORDED
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.catalog.view_runner import Paths, Request, run_views
from kineto_trace.html.charts import SERIES, Series, lines, stacked_bars
from kineto_trace.open.trace_discovery import Source, find_traces
from kineto_trace.view_api.cell_texts import PROSE, cell, headings, unit
from kineto_trace.view_api.result import Result

MAX_ROWS = 100
MAX_BARS = 40
MAX_POINTS = 2000
LEAST_SHARE = 1.0  # %


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading of the page with the content below it."""

    name: str
    title: str
    text: str
    chart: Markup
    result: Result
    with_table: bool

    @property
    def shown(self) -> bool:
        """Tells whether there is anything to show, be it that the view failed, or why it predicts nothing."""
        return bool(self.result.failure or self.chart or self.with_table) or self.name in EXPLAINED


Chart = Callable[[Result], Markup]


def write_report(
    path: str | PathLike[str], sources: Paths | Iterable[Paths], *, executor: Executor | None = None
) -> int:
    """Writes the page for these traces (files, folders, patterns or what find_traces() has found). Returns its size.

    Raises FileError if no trace can be read, TraceError if no view works on them, OSError.
    """
    found = find_traces(sources) if isinstance(sources, (str, PathLike)) else sources
    listed = list(found) if not isinstance(found, Source) else [found]
    text = page(listed, executor=executor).encode()
    write_atomically(Path(path), text)
    return len(text)


def page(sources: Sequence[Paths], *, executor: Executor | None = None) -> str:
    """Returns the text of the page."""
    shown = [name for name in SHOWN if len(sources) > 1 or name not in OF_SEVERAL]
    wanted = ("overview", "not_recorded", "findings", *shown)
    results = {
        result.view: result for result in run_views([_request(name) for name in wanted], sources, executor=executor)
    }
    findings = results["findings"]
    if len(sources) > 1:
        findings = common_findings(findings, len(sources), results["rank_what_if"])
    sections = [_section(name, results[name]) for name in shown]
    environment = Environment(
        loader=PackageLoader("kineto_trace.html", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(cell=cell, headings=headings, unit=unit)
    return environment.get_template("report.html").render(
        version=__version__,
        traces=[_trace_name(source) for source in sources],
        overview=results["overview"],
        missing=results["not_recorded"],
        findings=findings,
        figure={column.name: column for column in findings.columns},
        rules={name: find_view(name).description for name in wanted},
        sections=[section for section in sections if section.shown],
        several=len(results["overview"]) > 1,
        max_rows=MAX_ROWS,
        prose=PROSE,
    )


def _request(name: str) -> Request:
    """The view as the page shows it: causes with less than 1 % are one."""
    return Request(view=name, options={"least": LEAST_SHARE} if name.endswith("time_causes") else {})


def _trace_name(source: Paths) -> str:
    return Path(source.path if isinstance(source, Source) else source).name


def _section(name: str, result: Result) -> ReportSection:
    title, text, chart, with_table = SHOWN[name]
    if result.failure:
        return ReportSection(name, title, text, Markup(""), result, with_table=False)
    return ReportSection(name, title, text, chart(result), result, with_table and len(result) > 0)


def _step_chart(result: Result) -> Markup:
    """Draws the steps of one trace, or the average step of each rank."""
    rows = result.rows()
    ranks = {row["rank"] for row in rows}
    if len(ranks) > 1:
        rows = [row for row in rows if row["step"] == "average"]
        labels = [f"rank {row['rank']}" for row in rows]
    else:
        rows = rows if len(rows) > 2 else rows[:1]  # the average of one step is that step
        labels = [f"step {row['step']}" if row["step"].isdigit() else row["step"] for row in rows]
        labels = [label if row["complete"] else f"{label} (part)" for label, row in zip(labels, rows, strict=True)]
    rows, labels = rows[-MAX_BARS:], labels[-MAX_BARS:]
    names = (*ROLES, OTHER, *([UNRECORDED] if any(row[f"{UNRECORDED}_us"] for row in rows) else ()))
    series = [Series(role.replace("_", " "), [(row[f"{role}_us"] or 0) / 1e3 for row in rows]) for role in names]
    return stacked_bars(labels, series, "ms")


def _idle_chart(result: Result) -> Markup:
    rows = result.rows()
    places = list(dict.fromkeys((row["rank"], row["device"]) for row in rows))[:MAX_BARS]
    shares = {(row["rank"], row["device"], row["cause"]): row["window_pct"] for row in rows}
    series = [
        Series(cause.replace("_", " "), [shares.get((*place, cause), 0.0) for place in places]) for cause in CAUSES
    ]
    labels = [f"rank {rank}, GPU {device}" for rank, device in places]
    return stacked_bars(labels, series, "%")


def _causes_chart(result: Result) -> Markup:
    """Draws the causes with the most time in colours of their own, and the rest together."""
    places: dict[tuple[int, int], Counter[str]] = {}
    for row in result.rows():
        places.setdefault((row["rank"], row["device"]), Counter())[row["cause"]] += row["share_pct"]
    bars = dict(list(places.items())[:MAX_BARS])
    total: Counter[str] = sum(bars.values(), Counter())
    named = [cause for cause, _ in total.most_common() if cause != OTHERS][: SERIES - 1]
    series = [Series(cause.replace("_", " "), [shares[cause] for shares in bars.values()]) for cause in named]
    rest = [shares.total() - sum(shares[cause] for cause in named) for shares in bars.values()]
    return stacked_bars([f"rank {rank}, GPU {device}" for rank, device in bars], [*series, Series(OTHERS, rest)], "%")


def _course(value: str, name: str, unit: str) -> Chart:
    """Draws a line per rank and GPU for a view with start_ns and duration_us, or time_ns."""

    def chart(result: Result) -> Markup:
        charts = Markup("")
        rows = result.rows()
        for rank, device in list(dict.fromkeys((row["rank"], row["device"]) for row in rows))[:8]:
            mine = [row for row in rows if (row["rank"], row["device"]) == (rank, device)]
            mine = mine[:: max(1, len(mine) // MAX_POINTS)]
            clock = "start_ns" if "start_ns" in mine[0] else "time_ns"
            times = [(row[clock] - mine[0][clock]) / 1e6 for row in mine]
            title = Markup("<h4>rank {}, GPU {}</h4>").format(rank, device)
            drawn = lines(times, [Series(name, [row[value] for row in mine])], unit=unit, time_unit="ms", top=100.0)
            charts += title + drawn if drawn else ""
        return charts

    return chart


def _memory_chart(result: Result) -> Markup:
    charts = Markup("")
    rows = result.rows()
    for rank, device in list(dict.fromkeys((row["rank"], row["device"]) for row in rows))[:8]:
        mine = [row for row in rows if (row["rank"], row["device"]) == (rank, device)]
        mine = mine[:: max(1, len(mine) // MAX_POINTS)]
        times = [row["time_us"] / 1e3 for row in mine]
        series = [
            Series(name, [None if row[key] is None else row[key] / 2**20 for row in mine])
            for name, key in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"))
        ]
        drawn = lines(times, series, unit="MiB", time_unit="ms")
        charts += Markup("<h4>rank {}, {}</h4>").format(rank, device) + drawn if drawn else ""
    return charts


def _rank_chart(result: Result) -> Markup:
    """Draws what the mean step of each rank is spent on; ranks that others wait for longest come first."""
    rows = [row for row in result.rows()[:MAX_BARS] if row["computation_us"] is not None]
    parts = [
        (
            row["computation_us"],
            row["communication_us"],
            row["step_us"] - row["computation_us"] - row["communication_us"],
        )
        for row in rows
    ]
    names = ("computation", "communication alone", "neither")
    series = [Series(name, [max(part[at], 0.0) / 1e3 for part in parts]) for at, name in enumerate(names)]
    return stacked_bars([f"rank {row['rank']}" for row in rows], series, "ms")


def _nothing(_result: Result) -> Markup:
    return Markup("")


# Views that say nothing of one rank alone.
OF_SEVERAL = frozenset({"ranks", "rank_time_causes", "rank_what_if", "rank_waits", "step_spread"})
EXPLAINED = frozenset({"rank_what_if"})  # without rows, their notes say why
# view -> title, what it says, its chart, whether its table is shown
SHOWN: Mapping[str, tuple[str, str, Chart, bool]] = {
    "ranks": ("Ranks", "Per step; those first for which the others wait longest.", _rank_chart, True),
    "rank_time_causes": ("What the time of all ranks went to", "Shares of the time of all GPUs, and of the ranks with "
                         "least and most of each.", _nothing, True),
    "rank_what_if": ("What faster ranks or hidden transfers would save", "By a model of the job; savings overlap and "
                     "must not be added up.", _nothing, True),
    "rank_waits": ("Who waits for whom", "In collectives, told by their durations; the longest waits first.",
                   _nothing, True),
    "step_spread": ("Steps over ranks", "Lengths on the host.", _nothing, True),
    "time_causes": ("What the time went to", "Of each GPU, one cause at each moment: they sum to 100 %.",
                    _causes_chart, True),
    "step_breakdown": ("Where the steps' time goes", "Each moment counts for the first of these that was active then.",
                       _step_chart, False),
    "gpu_summary": ("GPUs", "Utilisation counts kernels; busy counts copies and fills too.", _nothing, True),
    "idle_causes": ("Why the GPUs were idle", "Share of the steps' time (or of the trace) in which a GPU did nothing.",
                    _idle_chart, True),
    "gpu_utilization": ("GPU utilisation over time", "", _course("utilization_pct", "utilisation", "%"), False),
    "kernels": ("Kernels", "By name, the one with the most time first.", _nothing, True),
    "operators": ("Operators", "Self: without the operators inside.", _nothing, True),
    "python_samples": ("Python", "By line, from samples of the stacks; what ran most first, idle threads last.",
                       _nothing, True),
    "threads": ("Threads", "Of the process, by CPU time; those without Python too.", _nothing, True),
    "collective_summary": ("Collectives", "Bandwidths by the factors of nccl-tests.", _nothing, True),
    "memory_curve": ("Memory", "", _memory_chart, False),
    "memory_peak": ("What filled the memory at its peak", "", _nothing, True),
    "recommendations": ("Thresholds that are exceeded", "The rules of the TensorBoard plug-in.", _nothing, True),
}  # fmt: skip
