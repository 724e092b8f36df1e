"""The command tree of kinetoctl."""

import click

from kinetoctl.base.common_options import LazyGroup, common_options
from kinetoctl.exit_codes import MEANINGS

# Where each command is, in kinetoctl.commands, and the first sentence of its help, so that --help imports none.
COMMANDS = {
    "trace": ("trace", "Trace running processes and download the traces."),
    "report": ("report", "Analyse traces: where the time goes, and what to change."),
    "diff": ("diff", "Compare two traces, or two jobs: what became slower, faster, new or gone."),
    "query": ("query", "Query traces in SQL (DuckDB's dialect)."),
    "open": ("open_trace", "Show a trace in the Perfetto UI."),
    "web": ("web", "Show captures, processes and traces in the browser."),
    "export": ("export", "Write a trace in another format, or merge the traces of several ranks."),
    "memory": ("trace:memory", "Take a CUDA memory snapshot of running PyTorch processes and download it."),
    "ps": ("ps", "List processes that train or use a GPU, and whether they can be traced."),
    "top": ("top", "Show the host, its GPUs and the processes that train or use a GPU, live."),
    "stacks": ("stacks", "Show where each rank of a job is, and which one the others are waiting for."),
    "counters": ("counters", "Sample the hardware counters of whole GPUs, without touching a process."),
    "doctor": ("doctor", "Check whether a process can be traced, and if not, what to do about it."),
    "explain": ("doctor:explain", "Explain the reason code of a verdict or an error: what it means and what to do."),
    "captures": ("captures", "List, show, fetch, cancel, pin, verify and delete captures."),
    "run": ("run", "Start a command whose Python processes can be traced."),
    "demo": ("demo", "Try it all out: a daemon, a training process, a trace of it and a report."),
    "host": ("host", "Show the daemon's host: versions, GPUs, store, limits and checks."),
    "plugin": ("plugin", "Write, check and list plug-ins for accelerators."),
    "migrate": ("migrate", "Convert the configuration of another profiler's daemon into one for kinetod."),
    "version": ("version", "Show the versions of kinetoctl and, if it can be reached, of the daemon."),
    "completion": ("version:completion", "Print the completion script for a shell."),
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
    modules={name: module for name, (module, _) in COMMANDS.items()},
    summaries={name: summary for name, (_, summary) in COMMANDS.items()},
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
    kinetoctl ps                                list the processes that train or use a GPU
    kinetoctl trace 1234 --report               trace a process, and see where its time goes
    kinetoctl memory 1234                       take a snapshot of its CUDA memory
    kinetoctl doctor 1234                       find out why it cannot be traced
    kinetoctl stacks --rank all                 if it hangs: find out where each rank is
    kinetoctl report trace.json.gz              see where the time goes, and what to change

    Results go to stdout; progress and messages go to stderr.
    """
