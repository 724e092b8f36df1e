"""The command tree of kinetoctl."""

import click

from kinetoctl.exit_codes import MEANINGS
from kinetoctl.lazy import LazyGroup
from kinetoctl.settings import common_options

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
    "captures": "kinetoctl.commands.captures",
    "run": "kinetoctl.commands.run",
    "demo": "kinetoctl.commands.demo",
    "host": "kinetoctl.commands.host",
    "version": "kinetoctl.commands.version",
    "completion": "kinetoctl.commands.completion",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())


@click.group(
    cls=LazyGroup,
    modules=COMMANDS,
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
