"""The command tree of kinetoctl."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.base.lazy_import import LazyGroup
from kinetoctl.exit_codes import MEANINGS

COMMANDS = {
    "trace": "kinetoctl.commands.trace",
    "report": "kinetoctl.commands.report",
    "diff": "kinetoctl.commands.diff",
    "query": "kinetoctl.commands.query",
    "open": "kinetoctl.commands.open_trace",
    "web": "kinetoctl.commands.web",
    "export": "kinetoctl.commands.export",
    "memory": "kinetoctl.commands.memory",
    "ps": "kinetoctl.commands.ps",
    "top": "kinetoctl.commands.top",
    "counters": "kinetoctl.commands.counters.counters_group",
    "doctor": "kinetoctl.commands.doctor",
    "explain": "kinetoctl.commands.explain",
    "captures": "kinetoctl.commands.captures.captures_group",
    "run": "kinetoctl.commands.run",
    "demo": "kinetoctl.commands.demo",
    "host": "kinetoctl.commands.host.host_group",
    "plugin": "kinetoctl.commands.plugin.plugin_group",
    "migrate": "kinetoctl.commands.migrate.migrate_group",
    "version": "kinetoctl.commands.version",
    "completion": "kinetoctl.commands.completion",
}
SUMMARIES = {
    "trace": "Trace running processes and download the traces.",
    "report": "Analyse traces: where the time goes, and what to change.",
    "diff": "Compare two traces, or two jobs: what became slower, faster, new or gone.",
    "query": "Query traces in SQL (DuckDB's dialect).",
    "open": "Show a trace in the Perfetto UI.",
    "web": "Show captures, processes and traces in the browser.",
    "export": "Write a trace in another format, or merge the traces of several ranks.",
    "memory": "Take a CUDA memory snapshot of running PyTorch processes and download it.",
    "ps": "List processes that train or use a GPU, and whether they can be traced.",
    "top": "Show the host, its GPUs and what trains or uses them, live.",
    "counters": "Sample the hardware counters of whole GPUs, without touching a process.",
    "doctor": "Check whether a process can be traced, and if not, what to do about it.",
    "explain": "Explain a reason code of a verdict or an error: what it means and what to do.",
    "captures": "List, show, fetch, cancel, pin, verify and delete captures.",
    "run": "Start a command whose Python processes can be traced.",
    "demo": "Try it all out: a daemon, a training process, a trace of it and a report.",
    "host": "Show the daemon's host: versions, GPUs, store, limits and checks.",
    "plugin": "Write, check and list plug-ins for accelerators.",
    "migrate": "Write kinetod's configuration from that of another profiler's daemon.",
    "version": "Show the versions of kinetoctl and, if it can be reached, of the daemon.",
    "completion": "Print the completion script for a shell.",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from kinetoctl.commands.version import UNKNOWN, client_version
        from kinetoctl.output.console import say

        say(f"kinetoctl {client_version() or UNKNOWN['kinetoctl']}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    modules=COMMANDS,
    summaries=SUMMARIES,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@common_options
def cli() -> None:
    """Trace running training processes on demand and analyse the traces.

    \b
    kinetoctl ps                                list what trains or uses a GPU
    kinetoctl trace 1234 --duration 5s          trace a process; no preparation needed
    kinetoctl memory 1234                       take a snapshot of its CUDA memory
    kinetoctl doctor 1234                       find out why it cannot be traced
    kinetoctl report trace.json.gz              see where the time goes, and what to change

    Results go to stdout; progress and messages go to stderr.
    """
