"""`kinetoctl diff`: two traces beside each other."""

from typing import TYPE_CHECKING

import click

from kinetoctl.exit_codes import ExitCode
from kinetoctl.settings import current, table_options
from kinetoctl.traces import one_trace, open_context, trace_argument, trace_errors

if TYPE_CHECKING:
    from kineto_trace.analysis.result import Result

DEFAULT_LIMIT = 20
VIEWS = {  # what is compared -> the view
    "ops": "diff_operators",
    "kernels": "diff_kernel_names",
    "steps": "diff_step_times",
    "modules": "diff_modules",
}


@click.command("diff")
@trace_argument("BASELINE")
@trace_argument("OTHER")
@click.option(
    "--by",
    type=click.Choice(list(VIEWS)),
    multiple=True,
    help="What is compared; may be given several times.  [default: steps, ops, kernels]",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help=f"Rows of each table; 0: all.  [default: {DEFAULT_LIMIT} in tables, else all]",
)
@table_options
def command(baseline: str, other: str, by: tuple[str, ...], limit: int | None) -> int:
    """Compare two traces: what became slower, faster, new or gone.

    \b
    kinetoctl diff before.json.gz after.json.gz
    kinetoctl diff --by kernels -o csv before.json.gz after.json.gz

    The largest changes come first. What a trace lacks counts as zero.
    """
    settings = current()
    names = dict.fromkeys(by or ("steps", "ops", "kernels"))
    with trace_errors(), one_trace(baseline, settings) as first, one_trace(other, settings) as second:
        from kineto_trace.analysis.catalog import find_view
        from kineto_trace.analysis.views.diff import compare

        contexts = open_context(first), open_context(second)
        results: dict[str, Result] = {name: compare(find_view(VIEWS[name]), *contexts) for name in names}
    if settings.file is not None:
        from kinetoctl.output.saving import save_results

        save_results(results, settings, limit=limit or 0)
        return ExitCode.DONE
    from kinetoctl.output.tables import show_results

    rows = limit if limit is not None else DEFAULT_LIMIT if settings.output == "table" else 0
    show_results(results, settings, limit=rows, title=len(results) > 1)
    return ExitCode.DONE
