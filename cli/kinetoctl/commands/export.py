"""`kinetoctl export`: a trace in another form."""

from pathlib import Path
from typing import Any

import click

from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import units
from kinetoctl.output.documents import emit
from kinetoctl.settings import current, options_without_form
from kinetoctl.traces import one_trace, open_context, trace_argument, trace_errors, write_errors

FORMATS = (
    *("chrome", "chrome-json", "perfetto", "tensorboard", "speedscope", "folded", "folded-gpu", "folded-samples"),
    "store",
)


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem
    from kineto_trace.export.write import FORMATS as WRITTEN

    return [CompletionItem(e.name, help=e.meaning) for e in WRITTEN.values() if e.name.startswith(incomplete)]


@click.command("export")
@trace_argument("TRACE")
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    shell_complete=_complete,
    help=f"{', '.join(FORMATS)}.  [default: by the suffix of --output]",
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="PATH",
    required=True,
    type=click.Path(path_type=Path),
    help="The file to write, or the folder of formats that are folders.",
)
@options_without_form
def command(trace: str, format_name: str | None, path: Path) -> int:
    """Write a trace in another form.

    \b
    kinetoctl export trace.json.gz -o trace.pftrace             for ui.perfetto.dev
    kinetoctl export trace.json.gz --format store -o trace      typed columns: opens at once
    kinetoctl export trace.json.gz --format tensorboard -o logs
    kinetoctl export trace.json.gz -o trace.speedscope.json

    A file that has the name is replaced. A trace of another tool keeps all of its events, also in forms that have no
    place of their own for some of their parts; what a form cannot hold is told.
    """
    settings = current()
    with one_trace(trace, settings) as source:
        if path.exists() and path.samefile(source.path):
            raise click.UsageError(f"--output: {path} is the trace itself")
        context = open_context(source)
        with trace_errors(), write_errors(path):
            from kineto_trace.export.write import export_trace

            written = export_trace(context.trace, path, format_name or "")
    notes = (*context.trace.notes, *written.notes)
    if settings.output == "table":
        click.echo(f"{written.path} ({units.size(written.size_bytes)})")
    else:
        emit({"path": str(written.path), "size_bytes": written.size_bytes, "notes": list(notes)}, settings.output)
    for note in () if settings.quiet else notes:
        click.echo(f"note: {note}", err=True)
    return ExitCode.DONE
