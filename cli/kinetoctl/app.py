"""The command tree of kinetoctl."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.base.lazy_import import LazyGroup
from kinetoctl.exit_codes import MEANINGS

PROGRAM = "kinetoctl"
COMPLETE_VARIABLE = "_KINETOCTL_COMPLETE"  # how a shell asks for completions: click's rule, from the name
COMMANDS = {
    "trace": "kinetoctl.commands.trace",
    "report": "kinetoctl.commands.report",
    "diff": "kinetoctl.commands.diff",
    "query": "kinetoctl.commands.query",
    "open": "kinetoctl.commands.open_trace",
    "export": "kinetoctl.commands.export",
    "memory": "kinetoctl.commands.memory",
    "ps": "kinetoctl.commands.ps",
    "top": "kinetoctl.commands.top",
    "doctor": "kinetoctl.commands.doctor",
    "captures": "kinetoctl.commands.captures.captures_group",
    "run": "kinetoctl.commands.run",
    "demo": "kinetoctl.commands.demo",
    "host": "kinetoctl.commands.host.host_group",
    "version": "kinetoctl.commands.version",
    "completion": "kinetoctl.commands.completion",
}
SUMMARIES = {
    "trace": "Trace running processes and bring the trace here.",
    "report": "Analyse traces: where the time goes, and what to change.",
    "diff": "Compare two traces: what became slower, faster, new or gone.",
    "query": "Ask traces in SQL (DuckDB's).",
    "open": "Show a trace in the Perfetto UI.",
    "export": "Write a trace in another form, or the traces of several ranks as one.",
    "memory": "Take a CUDA memory snapshot of running PyTorch processes and bring it here.",
    "ps": "List processes that can be traced.",
    "top": "Show the host, its GPUs and the processes on them, live.",
    "doctor": "Can this process be traced, and if not, what to do about it?",
    "captures": "List, show, fetch, cancel, keep, verify and delete captures.",
    "run": "Start a command whose Python processes can be traced.",
    "demo": "Try it all out: a daemon, a training process, a trace of it and a report.",
    "host": "Show the daemon's host: versions, GPUs, store, limits and checks.",
    "version": "Show the versions of kinetoctl and of the daemon, if there is one.",
    "completion": "Print the completion script of a shell.",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())


@click.group(
    cls=LazyGroup,
    modules=COMMANDS,
    summaries=SUMMARIES,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@common_options
def cli() -> None:
    """Take traces of running training processes, on demand, and say what is in them.

    \b
    kinetoctl ps --all                          see what can be traced
    kinetoctl trace --pid 1234 --duration 5s    trace it; it needs no preparation
    kinetoctl memory --pid 1234                 take a snapshot of its CUDA memory
    kinetoctl doctor 1234                       see why it cannot be traced
    kinetoctl report trace.json.gz              see where the time goes, and what to change

    Results go to stdout; progress and messages go to stderr.
    """
