"""`kinetoctl diff`: compares two traces, or the ranks of two jobs."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

import click
from kineto_protos.options import Parsed
from kineto_trace.base.quantities import more, shortened, shortened_apart
from kineto_trace.base.visible_text import one_line

from kinetoctl.base.common_options import CommonOptions, current, table_options
from kinetoctl.base.view_settings import COUNTERPARTS, DIFF_VIEWS, TREE, TREE_VIEWS, options_of, parse_setting
from kinetoctl.errors import NotComparable, UsageProblem, trace_errors, write_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import found_traces, open_context, trace_argument
from kinetoctl.output.console import say
from kinetoctl.output.units import human

if TYPE_CHECKING:
    from kineto_trace.analysis.diff.view_differences import Check
    from kineto_trace.open.trace_discovery import Source
    from kineto_trace.view_api.result import Result

DEFAULT_LIMIT = 20
WITH_TOTALS = ("ops", "modules", "paths")
STEPS, RANKS, CHECKS = "steps", "ranks", "checks"
DEFAULT_BY = (STEPS, "ops", "kernels")
ROOT = "0"
GITHUB_SUMMARY = "GITHUB_STEP_SUMMARY"  # the file that GitHub Actions shows as the summary of a job
_LIMIT = re.compile(r"(?:(?P<view>[a-z]+)=)?(?P<percent>\d+(?:\.\d+)?)%?")
NOISE = "within noise"
SIDES = ("BASELINE", "OTHER")
HUNG = tuple(f"In {side}, nothing moved" for side in SIDES)
ALWAYS_WHOLE = ("steps", "ranks")  # tables in which rows within the noise are of interest too
MARKDOWN_ROWS = 10
NAME_WIDTH = 100


def _parse_limit(text: str) -> tuple[str, float]:
    """A limit as view and percent. Raises ValueError."""
    found = _LIMIT.fullmatch(text)
    if found is None or (found["view"] or STEPS) not in DIFF_VIEWS:
        raise ValueError(
            f"{text!r} is not a limit; use, for example, 5% for the step time, or ops=20% for each operator "
            f"(also {', '.join(name for name in DIFF_VIEWS if name not in (STEPS, 'ops'))})"
        )
    return found["view"] or STEPS, float(found["percent"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The options as click parsed them; None or empty: not given."""

    by: tuple[str, ...]
    views: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    total: bool
    everything: bool
    rank: int | None
    base_rank: int | None
    path: str | None
    compat: str | None
    limit: int | None
    fail_on: tuple[tuple[str, float], ...]
    junit: Path | None
    markdown: Path | None
    github_summary: bool

    @property
    def names(self) -> list[str]:
        """What to compare, each once; what --fail-on needs is among it."""
        default = (TREE, "ops") if self.path is not None else () if self.views else DEFAULT_BY
        chosen = self.by or default
        return list(dict.fromkeys((*chosen, *(view for view, _ in self.fail_on))))


@click.command("diff")
@trace_argument("BASELINE")
@trace_argument("OTHER")
@click.option(
    "--by",
    type=click.Choice([*DIFF_VIEWS, TREE]),
    multiple=True,
    help=f"What to compare; repeatable.  [default: {', '.join(DEFAULT_BY)}]",
)
@click.option(
    "--view",
    "views",
    metavar="NAME",
    multiple=True,
    help="Compare the rows of this view of `kinetoctl report`; repeatable.",
)
@click.option(
    "--set",
    "settings",
    type=Parsed("name=value", parse_setting),
    multiple=True,
    help="Set an option of these views, or of a single one with VIEW.NAME=VALUE; repeatable.",
)
@click.option(
    "--total", is_flag=True, help="Compare total times of ops, modules and paths, including what is inside them."
)
@click.option(
    "--all", "everything", is_flag=True, help="Show rows within the noise too (formats other than tables always do)."
)
@click.option(
    "--fail-on",
    metavar="[VIEW=]PERCENT",
    type=Parsed("limit", _parse_limit),
    multiple=True,
    help="Exit with code 9 if the step time, or a row of VIEW, grew by at least this much beyond the noise, for "
    "example 5% or ops=20%; repeatable.",
)
@click.option(
    "--junit", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write the checks as JUnit XML."
)
@click.option(
    "--markdown",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the changes and the checks as Markdown.",
)
@click.option("--github-summary", is_flag=True, help=f"Append the Markdown to the file named by ${GITHUB_SUMMARY}.")
@click.option("--rank", metavar="N", type=int, help="Only this rank of OTHER.")
@click.option(
    "--base-rank",
    metavar="N",
    type=int,
    help="Compare every rank of OTHER with this rank of BASELINE.",
)
@click.option(
    "--path",
    metavar="PATH",
    help="Compare the children of this node of the tree, for example 0-2 (see the column path); with --by ops, its "
    "operators.",
)
@click.option(
    "--compat",
    type=click.Choice(["plugin"]),
    help="Compute times of the tree and its operators by the rules of the TensorBoard plug-in.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help=f"Rows per table; 0 for all.  [default: {DEFAULT_LIMIT} in tables, otherwise all]",
)
@table_options
def command(baseline: str, other: str, **values: Any) -> int:
    """Compare two traces, or two jobs: what became slower, faster, new or gone.

    \b
    kinetoctl diff before.json.gz after.json.gz
    kinetoctl diff --by kernels -o csv before.json.gz after.json.gz
    kinetoctl diff --fail-on 5% --junit diff.xml before/ after/
    kinetoctl diff --by tree --path 0-2 before.json.gz after.json.gz
    kinetoctl diff --base-rank 0 --rank 3 job/ job/
    kinetoctl diff --view overview --view step_phases before/ after/

    Times are means per complete step. A difference counts as a change only if it is beyond the noise between steps.
    Folders and patterns stand for the ranks of a job; ranks are matched by number.
    """
    options, settings = DiffOptions(**values), current()
    _check(options)
    with trace_errors():
        with found_traces([baseline], settings) as first, found_traces([other], settings) as second:
            chosen = _of_rank(other, _ranks(other, second), options.rank)
            before = _of_rank(baseline, _ranks(baseline, first), options.base_rank)
            if options.base_rank is not None:  # with every rank
                before = dict.fromkeys(chosen, before[options.base_rank])
            results = _results(options, before, chosen)
        checks = _checks(options, results)
    _show(_with_checks(results, checks, settings), options, settings)
    _write(results, checks, options)
    return _exit_code(results, checks, settings)


def _check(options: DiffOptions) -> None:
    if options.path is not None and not {TREE, "ops"} >= set(options.names):
        raise click.UsageError(f"--path only applies to --by {TREE} and --by ops")
    if options.compat and not {TREE, "ops"} >= set(options.names):
        raise click.UsageError(f"--compat only applies to --by {TREE} and --by ops")
    if options.fail_on and (options.path is not None or options.compat):
        raise click.UsageError("--fail-on checks times per step, but --path and --compat compare sums: leave one out")
    for name in options.views:
        by = next((by for by, view in DIFF_VIEWS.items() if view == COUNTERPARTS.get(name)), None)
        if by is not None:
            raise click.UsageError(f"the view {name} is compared step by step: use --by {by} instead")
    if options.settings and not options.views:
        raise click.UsageError("--set only applies to --view")
    if options.total and set(options.names).isdisjoint(WITH_TOTALS):
        raise click.UsageError(f"--total only applies to --by {', '.join(WITH_TOTALS)}")
    if options.junit is not None and not options.fail_on:
        raise click.UsageError("--junit writes the checks of --fail-on: give at least one --fail-on")
    if options.github_summary and not os.environ.get(GITHUB_SUMMARY):
        raise click.UsageError(f"--github-summary needs the variable {GITHUB_SUMMARY}; elsewhere, use --markdown FILE")


def _ranks(argument: str, sources: Sequence["Source"]) -> dict[int, "Source"]:
    """The traces of a job by rank. Raises UsageProblem if two have the same rank."""
    found: dict[int, Source] = {}
    for source in sources:
        if source.rank in found:
            both = f"{found[source.rank].path} and {source.path}"
            raise UsageProblem(f"{argument} has several traces of rank {source.rank}; name one of them: {both}")
        found[source.rank] = source
    return found


def _of_rank(argument: str, found: dict[int, "Source"], rank: int | None) -> dict[int, "Source"]:
    """The trace of this rank alone; all of them for None. Raises UsageProblem."""
    if rank is None:
        return found
    if rank not in found:
        raise UsageProblem(f"{argument} has no trace of rank {rank}; its ranks are: {', '.join(map(str, found))}")
    return {rank: found[rank]}


def _results(
    options: DiffOptions, first: Mapping[int, "Source"], second: Mapping[int, "Source"]
) -> dict[str, "Result"]:
    if len(first) == len(second) == 1:  # two traces are compared whatever their ranks
        second = dict(zip(first, second.values(), strict=True))
    shared = sorted(set(first) & set(second))
    if not shared:
        raise UsageProblem(
            f"the two jobs have no rank in common: {', '.join(map(str, first))} versus {', '.join(map(str, second))}"
        )
    views = _views(options, first, second, shared) if options.views else {}
    return {**(_per_step(options, first, second, shared) if options.names else {}), **views}


def _per_step(
    options: DiffOptions, first: Mapping[int, "Source"], second: Mapping[int, "Source"], shared: Sequence[int]
) -> dict[str, "Result"]:
    if not set(options.names) <= set(DIFF_VIEWS) or options.path is not None or options.compat:
        return _trees(options, first, second)
    return _compared(options, first, second, shared)


def _compared(
    options: DiffOptions, first: Mapping[int, "Source"], second: Mapping[int, "Source"], shared: Sequence[int]
) -> dict[str, "Result"]:
    """The results per step, rank by rank, so that memory is bounded by one trace."""
    from kineto_trace.analysis.diff.diff_views import compare_jobs, compare_ranks, missing_ranks
    from kineto_trace.analysis.host_findings.standing import standing
    from kineto_trace.catalog.view_catalog import find_view

    views = {name: find_view(DIFF_VIEWS[name]) for name in options.names}
    sides: list[dict[str, dict[int, Any]]] = []
    hung = []
    for side, sources in zip(SIDES, (first, second), strict=True):
        sides.append({name: {} for name in views})
        stands = False
        for rank in shared:
            context = open_context(sources[rank])
            stands = stands or next(standing(context), None) is not None
            for name, view in views.items():
                chosen: dict[str, Any] = {"total": options.total} if name in WITH_TOTALS else {}
                sides[-1][name][rank] = view.partial(context, **chosen)
        if stands:
            hung.append(_standstill(side, [sources[rank].path for rank in shared]))
    missing = tuple(missing_ranks(first, second))
    results = {}
    for name, view in views.items():
        before, after = (side[name] for side in sides)
        if name == STEPS and len(shared) > 1:
            results[RANKS] = compare_ranks(before, after)
        results[name] = compare_jobs(view, list(before.values()), list(after.values()))
    return {name: replace(result, notes=(*hung, *result.notes, *missing)) for name, result in results.items()}


def _standstill(side: str, paths: Sequence[Path]) -> str:
    """What the report says of traces in which nothing moved."""
    from kineto_trace.catalog.first_screen import first_screen_of

    verdict = first_screen_of(paths).verdict
    return f"In {side}, {verdict[:1].lower()}{verdict[1:]}"


def _views(
    options: DiffOptions, first: Mapping[int, "Source"], second: Mapping[int, "Source"], shared: Sequence[int]
) -> dict[str, "Result"]:
    """The rows of views beside each other. Raises ViewError for those whose rows have no counterparts."""
    from kineto_trace.analysis.diff.diff_views import missing_ranks
    from kineto_trace.analysis.diff.view_differences import extent, view_differences
    from kineto_trace.catalog.view_catalog import find_view
    from kineto_trace.catalog.view_runner import Request, all_combined, contribution_of

    views = [find_view(name) for name in dict.fromkeys(options.views)]
    chosen = options_of(views, options.settings)
    requests = [Request(view=view.name, options=chosen[view.name]) for view in views]
    results, extents = [], []
    for sources in (first, second):
        contributions, lengths = [], {}
        for rank in shared:
            context = open_context(sources[rank])
            source = replace(sources[rank], rank=rank)
            contributions.append(contribution_of(source, context, requests, alone=len(shared) == 1))
            lengths[rank] = context.get(extent)
        results.append(all_combined(requests, contributions))
        extents.append(lengths)
    missing = tuple(missing_ranks(first, second))
    found = {}
    for before, after in zip(*results, strict=True):
        failed = next((result for result in (before, after) if result.failure), None)
        result = failed or view_differences(before, after, (extents[0], extents[1]))
        found[result.view] = replace(result, notes=(*result.notes, *missing))
    return found


def _trees(options: DiffOptions, first: Mapping[int, "Source"], second: Mapping[int, "Source"]) -> dict[str, "Result"]:
    """The results that go by nodes of the tree, and others beside them. Raises UsageProblem for jobs."""
    from kineto_trace.analysis.diff.diff_views import compare
    from kineto_trace.catalog.view_catalog import find_view
    from kineto_trace.view_api.view import Compat

    for side in (first, second):
        if len(side) > 1:
            names = ", ".join(str(source.path) for source in list(side.values())[:3])
            raise UsageProblem(
                f"--by {TREE}, --path and --compat compare one trace with another, but there are several: {names}"
            )
    before, after = (open_context(next(iter(side.values()))) for side in (first, second))
    node, compat = options.path or ROOT, Compat(options.compat or Compat.NONE)
    found = {}
    for name in options.names:
        if name == TREE or (name == "ops" and (options.path is not None or options.compat)):
            found[name] = compare(find_view(TREE_VIEWS[name]), before, after, path=node, compat=compat)
        else:
            chosen = {"total": options.total} if name in WITH_TOTALS else {}
            found[name] = compare(find_view(DIFF_VIEWS[name]), before, after, **chosen)
    return found


def _checks(options: DiffOptions, results: Mapping[str, "Result"]) -> dict[str, list["Check"]]:
    """By what was limited: the outcome of each check, which is unknown if a trace is truncated."""
    if not options.fail_on:
        return {}
    from kineto_trace.analysis.diff.view_differences import CheckOutcome, regressions

    checks = {
        view: regressions(results[view], percent, only="step" if view == STEPS else "")
        for view, percent in options.fail_on
    }
    cut = _truncation(results)
    if not cut:
        return checks
    return {
        view: [replace(check, outcome=CheckOutcome.UNKNOWN, message=cut) for check in found]
        for view, found in checks.items()
    }


def _truncation(results: Mapping[str, "Result"]) -> str:
    """The first note on a truncated trace; "" if there is none."""
    return next(filter(None, (result.truncation for result in results.values())), "")


def _with_checks(
    results: Mapping[str, "Result"], checks: Mapping[str, list["Check"]], settings: CommonOptions
) -> Mapping[str, "Result"]:
    """The results, and where several tables fit into one document, what the checks found."""
    if not checks or settings.output not in ("json", "yaml"):
        return results
    from kineto_trace.analysis.diff.view_differences import checks_result

    return {**results, CHECKS: checks_result(checks)}


def _show(results: Mapping[str, "Result"], options: DiffOptions, settings: CommonOptions) -> None:
    from kinetoctl.output.result_tables import save_results, show_results

    if settings.file is not None:
        save_results(results, settings, limit=options.limit or 0)
        return
    limit = options.limit
    if settings.output == "table":
        limit = DEFAULT_LIMIT if limit is None else limit
        for line in headline(results):
            say(line, bold=True)
        results = {name: replace(result, notes=_without_standstills(result)) for name, result in results.items()}
        if not options.everything:
            results = {name: without_noise(name, result) for name, result in results.items()}
    show_results(results, settings, limit=limit or 0, title=len(results) > 1)


def _write(results: Mapping[str, "Result"], checks: Mapping[str, list["Check"]], options: DiffOptions) -> None:
    if options.junit is not None:
        write_junit(checks, options.junit)
    if options.markdown is not None:
        write_markdown(results, checks, options.markdown)
    if options.github_summary:
        append_markdown(results, checks, Path(os.environ[GITHUB_SUMMARY]))


def _exit_code(
    results: Mapping[str, "Result"], checks: Mapping[str, list["Check"]], settings: CommonOptions
) -> ExitCode:
    """Says what the checks found. Raises NotComparable if one could not be made and none failed."""
    from kineto_trace.analysis.diff.view_differences import CheckOutcome

    every = [(view, check) for view, found in checks.items() for check in found]
    for view, check in every:
        if check.outcome is CheckOutcome.FAILED or not settings.quiet:
            say(f"{check.outcome}: {view}: {check.row}: {check.message}", err=True)
    if any(check.outcome is CheckOutcome.FAILED for _, check in every):
        return ExitCode.REGRESSED
    unknown = [f"{view}: {check.message}" for view, check in every if check.outcome is CheckOutcome.UNKNOWN]
    if unknown:
        raise NotComparable(f"--fail-on: no verdict is possible: {'; '.join(dict.fromkeys(unknown))}")
    partial = any(note.endswith(": not compared") for result in results.values() for note in result.notes)
    return ExitCode.PARTIAL if partial or _truncation(results) else ExitCode.DONE


# What `kinetoctl diff` found, for people and for CI: a headline, Markdown and JUnit XML.
# Names come from traces, so that they may hold anything: control characters are spelled out (XML cannot hold them at
# all), and Markdown has names as code, in which nothing is a link or a tag.
def headline(results: Mapping[str, "Result"]) -> list[str]:
    """Says where a side stands still, and how the step time changed: the typical one where `report` has the mean."""
    from kineto_trace.analysis.diff.diff_views import TRIMMED
    from kineto_trace.analysis.diff.view_differences import change_text

    hung = [note for result in results.values() for note in result.notes if note.startswith(HUNG)]
    steps = results.get("steps")
    if hung or steps is None or "verdict" not in steps.table.column_names:
        return list(dict.fromkeys(hung))
    what = "typical step time" if any(TRIMMED in note for note in steps.notes) else "step time"
    return [f"{what}: {change_text(row)}" for row in steps.rows() if row["name"] == "step"]


def _without_standstills(result: "Result") -> tuple[str, ...]:
    return tuple(note for note in result.notes if not note.startswith(HUNG))


def without_noise(name: str, result: "Result") -> "Result":
    """The result without rows within the noise; a note counts them."""
    if name in ALWAYS_WHOLE or "verdict" not in result.table.column_names:
        return result
    keep = [verdict != NOISE for verdict in result.values("verdict")]
    hidden = len(keep) - sum(keep)
    if not hidden:
        return result
    told = f"{hidden:,} row{'s are' if hidden > 1 else ' is'} within the noise (--all shows them)"
    return replace(result, table=result.table.filter(keep), notes=(*result.notes, told))


def markdown(results: Mapping[str, "Result"], checks: Mapping[str, Sequence["Check"]]) -> str:
    """The checks, the headline and the largest changes as a document for a CI summary."""
    lines = ["## kinetoctl diff", ""]
    lines += [line.join(("**", "**")) + "\n" for line in headline(results)]
    for view, found in checks.items():
        lines += [f"- **{check.outcome}** {view}: {_code(check.row)} {_plain(check.message)}" for check in found]
    for name, result in results.items():
        if "verdict" not in result.table.column_names:
            continue
        rows = [row for row in result.rows() if name in ALWAYS_WHOLE or row["verdict"] != NOISE]
        lines += ["", f"### {name}", ""]
        if rows:
            lines += ["| name | time | verdict | baseline | other | difference |", "|---|---|---|--:|--:|--:|"]
        names = shortened_apart([one_line(row["name"]) for row in rows[:MARKDOWN_ROWS]], NAME_WIDTH)
        for name_shown, row in zip(names, rows, strict=False):
            share = "" if row["delta_pct"] is None else f" ({row['delta_pct']:+.1f} %)"
            times = [human(row[key], "us") for key in ("baseline_us", "other_us", "delta_us")]
            lines.append(f"| {_code(name_shown)} | {row['time']} | {row['verdict']} | {' | '.join(times)}{share} |")
        rest = len(result) - len(rows[:MARKDOWN_ROWS])
        lines += ["", f"{more(rest, 'row')}."] if rest else []
        lines += [f"- {_plain(note)}" for note in ("", *result.notes) if note]
    return "\n".join(lines) + "\n"


def write_markdown(results: Mapping[str, "Result"], checks: Mapping[str, Sequence["Check"]], path: Path) -> None:
    """Writes the document into a file of its own. Raises NotWritten."""
    from kineto_trace.base.atomic_files import write_atomically

    with write_errors(path):
        write_atomically(path, markdown(results, checks).encode("utf-8", "replace"))


def append_markdown(results: Mapping[str, "Result"], checks: Mapping[str, Sequence["Check"]], path: Path) -> None:
    """Adds the document to a file that others write into as well. Raises NotWritten."""
    with write_errors(path), path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(markdown(results, checks))


def write_junit(checks: Mapping[str, Sequence["Check"]], path: Path) -> None:
    """Writes one test case for each check: a regression is a failure, what cannot be judged an error."""
    from kineto_trace.base.atomic_files import write_atomically

    suites = Xml.Element("testsuites")
    for view, found in checks.items():
        counts = {name: sum(check.outcome == outcome for check in found) for name, outcome in _ELEMENTS.items()}
        suite = Xml.SubElement(suites, "testsuite", name=f"kinetoctl diff {view}", tests=str(len(found)))
        suite.set("failures", str(counts["failure"]))
        suite.set("errors", str(counts["error"]))
        for check in found:
            case = Xml.SubElement(suite, "testcase", classname=f"kinetoctl.diff.{view}", name=_xml(check.row))
            kind = next((name for name, outcome in _ELEMENTS.items() if check.outcome == outcome), "system-out")
            told = Xml.SubElement(case, kind)
            told.text = _xml(check.message)
            if kind != "system-out":
                told.set("message", _xml(check.message))
    Xml.indent(suites)
    with write_errors(path):
        write_atomically(path, Xml.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")


_ELEMENTS = {"failure": "failed", "error": "unknown"}  # of JUnit -> CheckOutcome


def _code(text: str) -> str:
    """A name as code in a table cell: with a fence longer than any in it, and no cell border."""
    shown = shortened(one_line(text), NAME_WIDTH).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _xml(text: str) -> str:
    """A text with what XML 1.0 cannot hold spelled out."""
    return re.sub("[\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", one_line(text))


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", one_line(text))
