"""`kinetoctl diff`: compares two traces."""

from typing import TYPE_CHECKING

import click

from kinetoctl.base.common_options import current, table_options
from kinetoctl.client.file_errors import trace_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import one_trace, open_context, trace_argument

if TYPE_CHECKING:
    from kineto_trace.model.context import Context
    from kineto_trace.view_api.result import Result

DEFAULT_LIMIT = 20
VIEWS = {"ops": "diff_operators", "kernels": "diff_kernel_names", "steps": "diff_step_times"}  # compared by name
MODULES = "modules"
DEFAULT_BY = ("steps", "ops", "kernels")
ROOT = "0"


@click.command("diff")
@trace_argument("BASELINE")
@trace_argument("OTHER")
@click.option(
    "--by",
    type=click.Choice([*VIEWS, MODULES]),
    multiple=True,
    help=f"What to compare; repeatable.  [default: {', '.join(DEFAULT_BY)}]",
)
@click.option(
    "--path",
    metavar="PATH",
    help="Node of the module tree (column path), for example 0-2: its children, or with --by ops its operators.",
)
@click.option(
    "--compat",
    type=click.Choice(["plugin"]),
    help="Compute times of modules and their operators by the rules of the TensorBoard plug-in.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help=f"Rows per table; 0 for all.  [default: {DEFAULT_LIMIT} in tables, otherwise all]",
)
@table_options
def command(
    baseline: str, other: str, by: tuple[str, ...], path: str | None, compat: str | None, limit: int | None
) -> int:
    """Compare two traces: what became slower, faster, new or gone.

    \b
    kinetoctl diff before.json.gz after.json.gz
    kinetoctl diff --by kernels -o csv before.json.gz after.json.gz
    kinetoctl diff --by modules --path 0-2 before.json.gz after.json.gz

    The largest changes come first. What is missing in one trace counts as zero.
    """
    settings = current()
    names = dict.fromkeys(by or ((MODULES, "ops") if path is not None else DEFAULT_BY))
    if path is not None and not {MODULES, "ops"} >= set(names):
        raise click.UsageError(f"--path is for --by {MODULES} and --by ops")
    with trace_errors(), one_trace(baseline, settings) as first, one_trace(other, settings) as second:
        contexts = open_context(first), open_context(second)
        results = {name: _compared(name, *contexts, path, compat) for name in names}
    if settings.file is not None:
        from kinetoctl.output.result_files import save_results

        save_results(results, settings, limit=limit or 0)
        return ExitCode.DONE
    from kinetoctl.output.result_tables import show_results

    rows = limit if limit is not None else DEFAULT_LIMIT if settings.output == "table" else 0
    show_results(results, settings, limit=rows, title=len(results) > 1)
    return ExitCode.DONE


def _compared(name: str, baseline: "Context", other: "Context", path: str | None, compat: str | None) -> "Result":
    from kineto_trace.analysis.diff.diff_views import compare
    from kineto_trace.catalog.view_catalog import find_view
    from kineto_trace.compat.views.plugin_diff_views import diff_tree, diff_tree_ops
    from kineto_trace.view_api.view import Compat

    if name == MODULES:
        return diff_tree(baseline, other, path=path or ROOT, compat=Compat(compat or Compat.NONE))
    if path is not None or (compat and name == "ops"):
        return diff_tree_ops(baseline, other, path=path or ROOT, compat=Compat(compat or Compat.NONE))
    return compare(find_view(VIEWS[name]), baseline, other)
