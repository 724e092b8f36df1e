"""`kinetoctl report`: analyses of one or many traces."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem
from kineto_protos.options import Parsed

from kinetoctl.base.common_options import CommonOptions, current, table_options
from kinetoctl.base.view_settings import options_of, parse_setting, type_text
from kinetoctl.errors import UsageProblem, trace_errors, write_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import all_snapshots, found_traces, memory_bound, snapshot_paths, traces_argument
from kinetoctl.output import units
from kinetoctl.output.console import emit, print_table, say, say_text
from kinetoctl.output.run_tables import side_by_side, without_rank
from kinetoctl.output.units import headings

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kineto_trace.catalog.first_screen import Runs
    from kineto_trace.open.trace_discovery import Source
    from kineto_trace.view_api.result import Result, ResultColumn
    from kineto_trace.view_api.view import View

WHAT_IF = "rank_what_if"
SNAPSHOT_VIEW = "snapshot_"  # what the names of the views of memory snapshots begin with
SETTING = Parsed("name=value", parse_setting)
WITH_VERDICT = ("table", "json", "yaml")  # formats that hold several tables
DEFAULT_LIMIT = 20
# Without --view, of one trace: first what the time went to, what to change and what is not in the trace, then details.
OVERVIEW = ("time_causes", "findings", "not_recorded", "overview", "kernels", "roofline", "operators", "python_samples")
PLUGIN_OVERVIEW = ("overview", "recommendations", "kernels", "operators")  # likewise with --compat plugin
JOB_OVERVIEW = (  # of a job's ranks, in the same order
    "rank_time_causes",
    "findings",
    "not_recorded",
    "ranks",
    "rank_what_if",
    "rank_waits",
    "step_spread",
    "collective_summary",
    "time_causes",
    "overview",
)
# Without rows they are left out, the second ones in tables for people alone: what is missing is in not_recorded.
OPTIONAL, OPTIONAL_FOR_PEOPLE = ("roofline", "python_samples"), ("not_recorded", "time_causes", "kernels")
TOP_FINDINGS = 3  # in tables for people
# %: causes with less are one row, in tables for people; of several ranks, each rank has its own rows.
LEAST_SHARE, LEAST_OF_RANK = 1.0, 5.0
# Rows of tables there.
SHORT = {
    "time_causes": 16,
    "kernels": 5,
    "roofline": 5,
    "operators": 5,
    "python_samples": 5,
    "not_recorded": 8,
    "ranks": 16,
    "rank_time_causes": 12,
    "rank_what_if": 5,
    "rank_waits": 8,
    "step_spread": 8,
    "collective_summary": 8,
    "overview": 8,
    "findings": 8,
}
MISSING_RANK = re.compile(r"rank \d+ is missing: ")  # notes of kineto_trace.catalog.view_runner
F = TypeVar("F")
COMPATS = ("plugin", "hta")
LIST_COLUMNS = ("VIEW", "COMPAT", "WHAT IT SHOWS")


def job_options(function: Any) -> Any:
    """Adds --workers and --scheduler."""
    for option in (
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            help="Dask scheduler on which to analyse the ranks, for example tcp://host:8786.",
        ),
        click.option(
            "--workers",
            metavar="N",
            type=click.IntRange(1),
            help="Number of processes that analyse the ranks.  [default: depends on cores and memory]",
        ),
    ):
        function = option(function)
    return function


@contextmanager
def executor_for(
    sources: Sequence["Source"], workers: int | None, scheduler: str | None
) -> Iterator["Executor | None"]:
    """Yields None to let the trace library choose. Raises UsageError, TraceError."""
    if workers and scheduler:
        raise click.UsageError("--workers and --scheduler cannot be combined: the cluster has its own workers")
    from kineto_trace.catalog.view_runner import cluster, pool

    if scheduler:
        with cluster(scheduler) as executor:
            yield executor
    elif workers and len(sources) > 1:
        with pool(sources, workers) as executor:
            yield executor
    else:
        yield None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The options as click parsed them; None or empty: not given."""

    traces: tuple[str, ...]
    views: tuple[str, ...]
    listing: bool
    describe: bool
    settings: tuple[tuple[str, str], ...]
    compat: str | None
    limit: int | None
    html: Path | None
    columns: str | None
    workers: int | None
    scheduler: str | None
    captures: str
    fleet: str


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from kineto_trace.catalog.view_catalog import VIEWS

    return [
        CompletionItem(name, help=view.description.partition("\n")[0])
        for name, view in sorted(VIEWS.items())
        if name.startswith(incomplete)
    ]


def _complete_setting(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Options of the views so far, and the words of one that takes a few."""
    from kineto_trace.catalog.view_catalog import VIEWS
    from kineto_trace.view_api.option_words import option_words

    views = [VIEWS[name] for name in ctx.params.get("views") or () if name in VIEWS]
    name, separator, _ = incomplete.partition("=")
    kinds = {option: view.option_type(option) for view in views for option in view.options}
    offered = [f"{name}={word}" for word in option_words(kinds.get(name))] if separator else [f"{n}=" for n in kinds]
    return [CompletionItem(text) for text in offered if text.startswith(incomplete)]


@click.command("report")
@traces_argument
@click.option(
    "--view",
    "views",
    metavar="NAME",
    multiple=True,
    shell_complete=_complete,
    help="View (analysis) to show; repeatable.  [default: where the time goes, top findings, overview]",
)
@click.option("--list", "listing", is_flag=True, help="List all views, one per line.")
@click.option(
    "--describe",
    is_flag=True,
    help="Describe the rules, options and columns of the views instead of running them; with --view VIEW.COLUMN, "
    "explain that column.",
)
@click.option(
    "--set",
    "settings",
    type=SETTING,
    multiple=True,
    shell_complete=_complete_setting,
    help="Set an option of the views, or of a single one with VIEW.NAME=VALUE; repeatable.",
)
@click.option(
    "--compat", type=click.Choice(COMPATS), help="Compute figures by the rules of the TensorBoard plug-in or of HTA."
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help=f"Rows per table; 0 for all.  [default: {DEFAULT_LIMIT} in tables, otherwise all]",
)
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a self-contained page with charts and tables instead of printing.",
)
@click.option("--columns", metavar="NAMES", help="Columns to show, in this order, for example name,total_us.")
@click.option(
    "--captures",
    metavar="ID",
    default="latest",
    help="Which capture to use if a process has several: an id, latest or all.  [default: latest]",
)
@click.option("--fleet", metavar="ID", default="", help="With a URL: only the parts of this multi-host capture.")
@job_options
@table_options
def command(**values: Any) -> int:
    """Analyse traces: where the time goes, and what to change.

    \b
    kinetoctl report trace.json.gz
    kinetoctl report --view kernels --limit 50 trace.json.gz
    kinetoctl report --view operators -o operators.parquet 'job/rank*.json.gz'
    kinetoctl report --html report.html trace.json.gz
    kinetoctl report --scheduler tcp://host:8786 's3://traces/cluster/*/20260131-*'
    kinetoctl report --list
    kinetoctl report --describe --view overview.sm_efficiency_pct

    TRACE is a Chrome trace from Kineto or PyTorch (.json, .json.gz), a Perfetto trace (.pftrace), an XLA profile
    (.xplane.pb), a folder of columns, a folder of any of these, a glob pattern, the URL of an object store,
    or the id of a capture. Several traces are treated as the ranks of one job.
    """
    options = ReportOptions(**values)
    settings = current()
    if options.listing or options.describe:
        return _explain(options, settings)
    if _about_snapshots(options):
        _show_snapshots(options, settings)
        return ExitCode.DONE
    with trace_errors(), _sources(options, settings) as sources:
        if options.html is not None:
            return _write_page(options, sources, settings)
        short = settings.output == "table" and settings.file is None
        runs = _runs(options, sources) if _is_overview(options) else None
        shown = sources if runs is None else [runs.newest]
        apart = [] if _is_overview(options) else _runs_apart(options, sources)
        if apart:
            limit_of = partial(_limit, options, settings)
            results = side_by_side(apart, lambda run: _results(options, [run], short=short), limit_of)
            options = replace(options, limit=0)  # which has been applied to each run
        else:
            results = _results(options, shown, short=short)
        if _is_overview(options) and settings.output in WITH_VERDICT:
            results = {**_first_answer(results, shown, runs), **results}
    if options.columns is not None:
        results = {name: _with_columns(result, options.columns) for name, result in results.items()}
    elif settings.output == "table" and len(shown) == 1:
        results = {name: without_rank(result) for name, result in results.items()}
    _show(results, options, settings)
    return _exit_code(results.values())


def print_report(traces: Sequence[str]) -> int:
    """`kinetoctl report` of these traces at the end of another command. Returns its exit code."""
    with command.make_context("report", list(traces), parent=click.get_current_context()) as context:
        return int(command.invoke(context))


def _about_snapshots(options: ReportOptions) -> bool:
    """Whether memory snapshots are asked for: by views of theirs alone, or by naming nothing but their files."""
    if options.views:
        return all(name.startswith(SNAPSHOT_VIEW) for name in options.views)
    return all_snapshots(options.traces)


def _show_snapshots(options: ReportOptions, settings: CommonOptions) -> None:
    """Raises UsageError, NotFound, TraceUnreadable, WrongAnalysis and the client's errors."""
    if options.html or options.compat or options.settings:
        raise click.UsageError(
            "--html, --compat and --set do not apply to memory snapshots; `kinetoctl web FILE` shows charts of them"
        )
    if not options.traces:
        raise click.UsageError("name a memory snapshot: a file, a folder, a glob pattern or the id of a capture")
    with ExitStack() as stack, trace_errors():
        paths = snapshot_paths(options.traces, settings, stack)
        stack.enter_context(memory_bound())
        from kineto_trace.snapshots.snapshot_reader import process_name, read_snapshot
        from kineto_trace.snapshots.snapshot_results import FIRST_VIEWS, NamedSnapshot, snapshot_results

        snapshots = [NamedSnapshot(process_name(path), read_snapshot(path)) for path in paths]
        results = snapshot_results(snapshots, tuple(dict.fromkeys(options.views)) or FIRST_VIEWS)
    if not options.views:
        results = [result for result in results if result.view != "snapshot_ooms" or len(result)]
    _show({result.view: _with_columns(result, options.columns) for result in results}, options, settings)


def _exit_code(results: "Iterable[Result]") -> ExitCode:
    """PARTIAL if a view failed, a rank is missing in it, or a file ended too early."""
    partial = any(
        result.failure or result.truncation or any(map(MISSING_RANK.match, result.notes)) for result in results
    )
    return ExitCode.PARTIAL if partial else ExitCode.DONE


def _sources(options: ReportOptions, settings: CommonOptions) -> AbstractContextManager[list["Source"]]:
    return found_traces(options.traces, settings, fleet=options.fleet, captures=options.captures, here=False)


def _overview(compat: str | None, traces: int) -> Sequence[str]:
    if compat == "plugin":
        return PLUGIN_OVERVIEW
    return OVERVIEW if traces == 1 else JOB_OVERVIEW


def _chosen(names: Sequence[str]) -> list["View"]:
    """The views of these names, each once. Raises ViewError."""
    from kineto_trace.catalog.view_catalog import find_view

    return [find_view(name) for name in dict.fromkeys(names)]


def _results(options: ReportOptions, sources: Sequence["Source"], *, short: bool) -> dict[str, "Result"]:
    """By view. A view that was asked for must know `compat`; those of the overview give their own figures else.

    Findings of several ranks are those of the job. short: the overview is for people, and begins with one screen.
    """
    from kineto_trace.catalog.view_runner import Request, run_views
    from kineto_trace.view_api.view import Compat

    views = _chosen(options.views or _overview(options.compat, len(sources)))
    settings = options_of(views, options.settings)
    if not options.views and "findings" in settings and short and len(sources) == 1:
        settings["findings"].setdefault("top", TOP_FINDINGS)
    if not options.views and short:
        for name, least in (
            ("time_causes", LEAST_SHARE if len(sources) == 1 else LEAST_OF_RANK),
            ("rank_time_causes", LEAST_SHARE),
        ):
            if name in settings:
                settings[name].setdefault("least", least)
    wanted = Compat(options.compat) if options.compat else Compat.NONE
    requests = [
        Request(
            view=view.name,
            compat=wanted if options.views or wanted in view.compat else Compat.NONE,
            options=settings[view.name],
        )
        for view in views
    ]
    of_job = len(sources) > 1 and "findings" in settings
    if of_job and WHAT_IF not in settings:
        requests.append(Request(view=WHAT_IF))
    with executor_for(sources, options.workers, options.scheduler) as executor:
        results = run_views(requests, sources, executor=executor)
    if of_job:
        top = TOP_FINDINGS if short and not options.views else None
        results = [each for each in _of_the_job(results, sources, top) if each.view in settings]
    if not options.views:
        optional = (*OPTIONAL, *OPTIONAL_FOR_PEOPLE) if short else OPTIONAL
        results = [result for result in results if result.view not in optional or len(result) or result.failure]
    own = {view.name for view in views if wanted is not Compat.NONE and wanted not in view.compat}
    note = f"{wanted} has no such view: these figures follow kinetod's own rules"
    return {
        result.view: replace(result, notes=(note, *result.notes)) if result.view in own else result
        for result in results
    }


def _is_overview(options: ReportOptions) -> bool:
    """Tells whether the report is in our own words: no views, columns or figures of other tools were asked for."""
    return not (options.views or options.compat or options.columns)


def _runs(options: ReportOptions, sources: Sequence["Source"]) -> "Runs | None":
    from kineto_trace.catalog.first_screen import find_runs

    with executor_for(sources, options.workers, options.scheduler) as executor:
        return find_runs(sources, executor=executor)


def _runs_apart(options: ReportOptions, sources: Sequence["Source"]) -> "list[Source]":
    """The traces, the oldest first, if they are runs of a program and must not be called ranks; else none."""
    from kineto_trace.catalog.first_screen import runs_in_order

    with executor_for(sources, options.workers, options.scheduler) as executor:
        return runs_in_order(sources, executor=executor)


def _first_answer(
    results: Mapping[str, "Result"], sources: Sequence["Source"], runs: "Runs | None"
) -> dict[str, "Result"]:
    """The verdict, and the table of the runs if the traces are runs of a program."""
    from kineto_trace.catalog.first_screen import verdict, verdict_result

    traces, ranks = len(sources), len({source.rank for source in sources})
    time = results.get("rank_time_causes" if traces > 1 else "time_causes")
    told = verdict_result(verdict(results["findings"], time, ranks=ranks, traces=traces))
    if runs is None:
        return {told.view: told}
    table = replace(runs.table, notes=(f"{runs.verdict} The rest of this report is about the newest one.",))
    return {told.view: told, table.view: table}


def _of_the_job(results: Sequence["Result"], sources: Sequence["Source"], top: int | None) -> list["Result"]:
    """With the findings of the job instead of those of each rank. top: how many of them; None: all."""
    from kineto_trace.analysis.findings.common_findings import common_findings

    by_view = {result.view: result for result in results}
    ranks = len({source.rank for source in sources})
    every = common_findings(by_view["findings"], ranks, by_view[WHAT_IF], traces=len(sources))
    rows = len(every) if top is None else top
    more = [f"{len(every) - rows} more: kinetoctl report --view findings"] if len(every) > rows else []
    by_view["findings"] = replace(every, table=every.table.slice(0, rows), notes=(*more, *every.notes))
    return list(by_view.values())


def _with_columns(result: "Result", names: str | None) -> "Result":
    """Only these columns. Raises UsageProblem."""
    if names is None:
        return result
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {column.name: column for column in result.columns}
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise UsageProblem(
            f"view {result.view} has no column {', '.join(unknown)}; its columns are: {', '.join(known)}"
        )
    return replace(result, columns=tuple(known[name] for name in wanted), table=result.table.select(wanted))


def _limit(options: ReportOptions, settings: CommonOptions, view: str) -> int:
    """How many rows of the view are shown, 0 for all."""
    if options.limit is not None or settings.file is not None or settings.output != "table":
        return options.limit or 0
    return DEFAULT_LIMIT if options.views else SHORT.get(view, DEFAULT_LIMIT)


def _show(results: dict[str, "Result"], options: ReportOptions, settings: CommonOptions) -> None:
    from kinetoctl.output.result_tables import save_results, show_results

    if settings.file is not None:
        save_results(results, settings, limit=options.limit or 0)
        return
    limits = {view: _limit(options, settings, view) for view in results}
    show_results(results, settings, limit=options.limit or 0, limits=limits, title=len(results) > 1)
    if not options.views and settings.output == "table" and not any(name.startswith(SNAPSHOT_VIEW) for name in results):
        say("")
        say("kinetoctl report --describe --view VIEW.COLUMN explains a column")


def _write_page(options: ReportOptions, sources: Sequence["Source"], settings: CommonOptions) -> int:
    from kineto_trace.html.report import write_report

    if options.views or options.compat or options.settings or options.columns:
        raise click.UsageError("--html chooses its own views: leave out --view, --compat, --set and --columns")
    assert options.html is not None
    with write_errors(options.html), executor_for(sources, options.workers, options.scheduler) as executor:
        size, results = write_report(options.html, sources, executor=executor)
    if not settings.quiet:
        say(f"{options.html} ({units.size(size)})", err=True)
    return _exit_code(results)


def _explain(options: ReportOptions, settings: CommonOptions) -> int:
    from kineto_trace.catalog.view_catalog import VIEWS

    if options.listing:
        list_views(list(VIEWS.values()), settings)
        return ExitCode.DONE
    with trace_errors():
        describe_views(_described(options, settings), settings)
    return ExitCode.DONE


def _described(options: ReportOptions, settings: CommonOptions) -> list[tuple["View", list["ResultColumn"]]]:
    """The named views, each with the columns that were named of it; else those that the report of the traces shows."""

    names = options.views
    if not names and options.traces:
        with _sources(options, settings) as sources:
            names = tuple(_overview(options.compat, len(sources)))
    found: dict[str, tuple[View, list[ResultColumn]]] = {}
    for name in names or _overview(options.compat, 1):
        title, _, column = name.partition(".")
        (view,) = _chosen([title.strip().replace(" ", "_")])
        _, columns = found.setdefault(view.name, (view, []))
        if column:
            columns.append(find_column(view, column))
    return list(found.values())


def summary(view: "View") -> str:
    """The first line of its description."""
    return view.description.partition("\n")[0]


def list_views(views: Sequence["View"], settings: CommonOptions) -> None:
    """Prints one line for each view, by name."""
    ordered = sorted(views, key=lambda view: view.name)
    if settings.output == "table":
        rows = [(view.name, ",".join(sorted(view.compat)) or "-", summary(view)) for view in ordered]
        print_table(LIST_COLUMNS, rows, color=settings.color)
    else:
        emit([_document(view) for view in ordered], settings.output)


def describe_views(views: Sequence[tuple["View", Sequence["ResultColumn"]]], settings: CommonOptions) -> None:
    """Prints the rules, options and columns of each view; with columns, these first and then the rules."""
    if settings.output == "table":
        say_text("\n\n".join(_definitions(view, only) if only else description(view) for view, only in views))
    else:
        emit([_document(view, only) for view, only in views], settings.output)


def find_column(view: "View", name: str) -> "ResultColumn":
    """The column of this name, which may lack its unit and be written as in tables. Raises UsageProblem."""
    wanted = name.lower().strip().replace(" ", "_").removesuffix("_%")
    titles = headings([(column.name, column.unit) for column in view.result_columns])
    for title, column in zip(titles, view.result_columns, strict=True):
        if wanted in (column.name, title.lower().replace(" ", "_").removesuffix("_%")):
            return column
    known = ", ".join(column.name for column in view.result_columns)
    raise UsageProblem(f"view {view.name} has no column {name}; its columns are: {known}")


def _definitions(view: "View", columns: Sequence["ResultColumn"]) -> str:
    lines = [f"{view.name}.{column.name}\n\n  {_type(column)}: {column.meaning}\n" for column in columns]
    return "\n".join([*lines, view.name, "", textwrap.indent(view.description, "  ")])


def _type(column: "ResultColumn") -> str:
    return column.type + (f" [{column.unit}]" if column.unit else "")


def description(view: "View") -> str:
    """The description of one view, as text."""
    lines = [view.name, "", textwrap.indent(view.description, "  ")]
    if view.options:
        lines += ["", "options (--set NAME=VALUE)"]
        lines += [f"  {row['name']} = {row['default']!r}: {row['type']}" for row in _options(view)]
    if view.compat:
        lines += ["", f"supports --compat: {', '.join(sorted(view.compat))}"]
    lines += ["", "columns"]
    width = max(len(column.name) for column in view.result_columns)
    for column in view.result_columns:
        lines.append(f"  {column.name.ljust(width)}  {_type(column)}: {column.meaning}")
    return "\n".join(lines)


def _options(view: "View") -> list[dict[str, Any]]:
    return [
        {"name": name, "type": type_text(view.option_type(name)), "default": _plain(default)}
        for name, default in view.options.items()
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else getattr(value, "value", value)


def _document(view: "View", columns: Sequence["ResultColumn"] = ()) -> dict[str, Any]:
    return {
        "name": view.name,
        "description": view.description,
        "compat": sorted(view.compat),
        "all_ranks": view.reduce is not None,
        "options": _options(view),
        "columns": [column._asdict() for column in columns or view.result_columns],
    }
