"""`kinetoctl export`: a trace in another format."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from kineto_trace.base.quantities import format_duration

from kinetoctl.base.common_options import CommonOptions, current, options_without_form
from kinetoctl.base.value_types import RANKS
from kinetoctl.errors import trace_errors, write_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import found_traces, one_trace, open_context, traces_argument
from kinetoctl.output import units
from kinetoctl.output.console import emit, say

if TYPE_CHECKING:
    from kineto_trace.formats.trace_export import Exported
    from kineto_trace.merge.merged_export import MergedTrace
    from kineto_trace.open.trace_discovery import Source

FORMATS = (
    *("chrome", "chrome-json", "perfetto", "tensorboard", "speedscope", "folded", "folded-gpu", "folded-samples"),
    *("pprof", "otlp", "store"),
)
ALIGNMENTS = ("collectives", "clock")


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from kineto_trace.formats.trace_export import FORMATS as WRITTEN

    return [CompletionItem(e.name, help=e.meaning) for e in WRITTEN.values() if e.name.startswith(incomplete)]


@click.command("export")
@traces_argument
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    shell_complete=_complete,
    help=f"{', '.join(FORMATS)}.  [default: from the suffix of --output]",
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="PATH",
    required=True,
    type=click.Path(path_type=Path),
    help="File to write, or folder for formats that are folders.",
)
@click.option("--merge", is_flag=True, help="Merge the traces of several ranks into one file, on one clock.")
@click.option(
    "--rank", "ranks", metavar="RANKS", type=RANKS, help="With --merge: only these ranks, for example 0,8-15."
)
@click.option(
    "--clocks",
    "clocks_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --merge: JSON file with the offset of each rank's clock.  [default: from the traces]",
)
@click.option(
    "--align",
    type=click.Choice(ALIGNMENTS),
    help="With --merge: refine the clock offsets with NCCL's collectives, or use them as they are.  "
    "[default: collectives]",
)
@click.option(
    "--scrub",
    is_flag=True,
    help="Leave out what may be private: paths, hosts, users, commands, environment. The names of functions and "
    "files stay.",
)
@options_without_form
def command(
    traces: tuple[str, ...],
    format_name: str | None,
    path: Path,
    merge: bool,
    ranks: tuple[int, ...] | None,
    clocks_path: Path | None,
    align: str | None,
    *,
    scrub: bool,
) -> int:
    """Write a trace in another format, or merge the traces of several ranks.

    \b
    kinetoctl export trace.json.gz -o trace.pftrace             for ui.perfetto.dev
    kinetoctl export trace.json.gz --format store -o trace      typed columns, which open quickly
    kinetoctl export trace.json.gz --format tensorboard -o logs
    kinetoctl export trace.json.gz -o trace.speedscope.json
    kinetoctl export trace.json.gz -o trace.pb.gz               for pprof, Pyroscope and others
    kinetoctl export trace.json.gz --scrub -o shared.json.gz    without what may be private
    kinetoctl export --merge --rank 0,8-15 job/ -o job.pftrace  several ranks: folders, patterns, captures

    An existing file is replaced. A trace from another tool keeps all its events; a note lists what the format
    cannot hold.

    With --merge, each rank becomes a process, in rank order, and all times are on the clock of one rank. The remaining
    uncertainty is printed.
    """
    settings = current()
    if merge and scrub:
        raise click.UsageError("--scrub cannot be combined with --merge: scrub each trace first, then merge them")
    if merge:
        return _merge(traces, format_name or "", path, ranks, clocks_path, align or ALIGNMENTS[0], settings)
    for name, value in (("--rank", ranks), ("--clocks", clocks_path), ("--align", align)):
        if value is not None:
            raise click.UsageError(f"{name} needs --merge")
    if len(traces) > 1:
        raise click.UsageError(f"got {len(traces)} traces: give only one, or merge them into one file with --merge")
    if not traces:
        raise click.UsageError("Missing argument 'TRACE...'.")
    with one_trace(traces[0], settings) as source:
        _not_itself(path, [source])
        context = open_context(source)
        with trace_errors(), write_errors(path):
            from kineto_trace.formats.trace_export import export_trace

            trace = context.trace
            if scrub:
                from kineto_trace.conversion.scrubbing import scrubbed

                trace = scrubbed(trace)
            written = export_trace(trace, path, format_name or "")
    _tell(written, {}, (*trace.notes, *written.notes), "", settings)
    return ExitCode.DONE


def _merge(
    traces: tuple[str, ...],
    format_name: str,
    path: Path,
    ranks: tuple[int, ...] | None,
    clocks_path: Path | None,
    align: str,
    settings: CommonOptions,
) -> int:
    with found_traces(traces, settings) as sources:
        _not_itself(path, sources)
        with trace_errors(), write_errors(path):
            from kineto_trace.collectives.rank_clocks import read_clocks
            from kineto_trace.merge.merged_export import merge_traces

            clocks = None if clocks_path is None else read_clocks(clocks_path)
            refine = align == ALIGNMENTS[0]
            merged = merge_traces(sources, path, format_name, ranks=ranks, clocks=clocks, refine=refine)
    members = {
        "reference_rank": merged.reference_rank,
        "clock_uncertainty_ns": merged.alignment.uncertainty_ns,
        "ranks": merged.clocks(),
    }
    _tell(merged.written, members, merged.written.notes, f": {_clocks_text(merged)}", settings)
    return ExitCode.DONE


def _clocks_text(merged: "MergedTrace") -> str:
    """How many ranks, and how far from each other their clocks may be."""
    count = len(merged.ranks)
    if count == 1:
        return f"only rank {merged.ranks[0]}"
    unknown = [clock["rank"] for clock in merged.clocks() if clock["clock_uncertainty_ns"] is None]
    known = merged.alignment.uncertainty_ns
    if known is not None:
        return f"{count} ranks, with clocks within {format_duration(known)} of rank {merged.reference_rank}'s"
    shown = ", ".join(map(str, unknown[:8])) + (", …" if len(unknown) > 8 else "")
    return f"{count} ranks; the clock offset from rank {merged.reference_rank} is unknown for ranks {shown}"


def _not_itself(path: Path, sources: Sequence["Source"]) -> None:
    if path.exists() and any(path.samefile(source.path) for source in sources):
        raise click.UsageError(f"--output: {path} is the input trace itself")


def _tell(
    written: "Exported", members: dict[str, Any], notes: Sequence[str], text: str, settings: CommonOptions
) -> None:
    if settings.output == "table":
        say(f"{written.path} ({units.size(written.size_bytes)}){text}")
    else:
        document = {"path": str(written.path), "size_bytes": written.size_bytes, **members, "notes": list(notes)}
        emit(document, settings.output)
    for note in () if settings.quiet else notes:
        say(f"note: {note}", err=True)
