"""`kinetoctl report`: what the analyses say of one or many traces."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from kineto_protos.options import Parsed

from kinetoctl.errors import UsageProblem
from kinetoctl.exit_codes import ExitCode
from kinetoctl.jobs import COMPATS, executor_for, job_options
from kinetoctl.settings import Settings, current, table_options
from kinetoctl.traces import found_traces, trace_errors, traces_argument
from kinetoctl.view_options import options_of, parse_setting

if TYPE_CHECKING:
    from kineto_trace.analysis.result import Result
    from kineto_trace.analysis.view import View

SETTING = Parsed("name=value", parse_setting)
DEFAULT_LIMIT = 20
OVERVIEW = ("overview", "recommendations")  # of `kinetoctl report` without --view


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem
    from kineto_trace.analysis.catalog import VIEWS

    return [
        CompletionItem(name, help=view.description.partition("\n")[0])
        for name, view in sorted(VIEWS.items())
        if name.startswith(incomplete)
    ]


@click.command("report")
@traces_argument
@click.option(
    "--view",
    "views",
    metavar="NAME",
    multiple=True,
    shell_complete=_complete,
    help="Analysis to show; may be given several times.  [default: overview and top findings]",
)
@click.option("--list", "listing", is_flag=True, help="List all views, one line each.")
@click.option("--describe", is_flag=True, help="With --view: its rules, options and columns instead of its result.")
@click.option(
    "--set", "settings_", type=SETTING, multiple=True, help="An option of the views; VIEW.NAME=VALUE: of one of them."
)
@click.option(
    "--compat", type=click.Choice(COMPATS), help="Figures of the TensorBoard plug-in or of HTA, by their rules."
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help=f"Rows of each table; 0: all.  [default: {DEFAULT_LIMIT} in tables, else all]",
)
@click.option("--columns", metavar="NAMES", help="Only these columns, in this order, like name,total_us.")
@job_options
@table_options
def command(
    traces: tuple[str, ...],
    views: tuple[str, ...],
    listing: bool,
    describe: bool,
    settings_: tuple[tuple[str, str], ...],
    compat: str | None,
    limit: int | None,
    columns: str | None,
    workers: int | None,
    scheduler: str | None,
) -> int:
    """Analyse traces: where the time goes, and what to change.

    \b
    kinetoctl report trace.json.gz
    kinetoctl report --view kernels --limit 50 trace.json.gz
    kinetoctl report --view operators -o operators.parquet 'job/rank*.json.gz'
    kinetoctl report --list

    TRACE is a Chrome trace of Kineto or PyTorch (.json, .json.gz), a Perfetto trace (.pftrace), a folder of columns,
    a folder of any of these, a pattern, or the id of a capture. Several are the ranks of one job.
    """
    settings = current()
    if listing or describe:
        return _explain(views, settings, describe=describe)
    with trace_errors():
        chosen = _chosen(views)
        options = options_of(chosen, settings_)
        results = _results(traces, chosen, options, compat, workers, scheduler, settings, strict=bool(views))
    results = {name: _with_columns(result, columns) for name, result in results.items()}
    _show(results, settings, limit=limit, title=len(results) > 1)
    return ExitCode.DONE


def _chosen(names: Sequence[str]) -> list["View"]:
    """The views asked for, each once. Raises ViewError."""
    from kineto_trace.analysis.catalog import VIEWS, find_view

    return [find_view(name) for name in dict.fromkeys(names or [name for name in OVERVIEW if name in VIEWS])]


def _results(
    traces: Sequence[str],
    views: Sequence["View"],
    options: dict[str, dict[str, Any]],
    compat: str | None,
    workers: int | None,
    scheduler: str | None,
    settings: Settings,
    *,
    strict: bool,
) -> dict[str, "Result"]:
    """strict: every view must know `compat`; else those that do not give their own figures."""
    from kineto_trace.analysis.view import Compat
    from kineto_trace.job import Request, run_views

    wanted = Compat(compat) if compat else Compat.NONE
    requests = [
        Request(
            view=view.name,
            compat=wanted if strict or wanted in view.compat else Compat.NONE,
            options=options[view.name],
        )
        for view in views
    ]
    with found_traces(traces, settings) as sources, executor_for(sources, workers, scheduler) as executor:
        found = run_views(requests, sources, executor=executor)
    return {result.view: result for result in found}


def _with_columns(result: "Result", names: str | None) -> "Result":
    """Only these columns. Raises UsageProblem."""
    if names is None:
        return result
    from dataclasses import replace

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {column.name: column for column in result.columns}
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise UsageProblem(f"view {result.view} has no column {', '.join(unknown)}; there are: {', '.join(known)}")
    return replace(result, columns=tuple(known[name] for name in wanted), table=result.table.select(wanted))


def _show(results: dict[str, "Result"], settings: Settings, *, limit: int | None, title: bool) -> None:
    from kinetoctl.output.saving import save_results
    from kinetoctl.output.tables import show_results

    if settings.file is not None:
        save_results(results, settings, limit=limit or 0)
        return
    rows = limit if limit is not None else DEFAULT_LIMIT if settings.output == "table" else 0
    show_results(results, settings, limit=rows, title=title)


def _explain(names: Sequence[str], settings: Settings, *, describe: bool) -> int:
    from kineto_trace.analysis.catalog import VIEWS

    from kinetoctl.output.views import describe_views, list_views

    if not describe:
        list_views(list(VIEWS.values()), settings)
        return ExitCode.DONE
    if not names:
        raise click.UsageError("--describe needs a --view; --list lists all views")
    with trace_errors():
        describe_views(_chosen(names), settings)
    return ExitCode.DONE
