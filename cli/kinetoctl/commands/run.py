"""`kinetoctl run`."""

import os
from pathlib import Path

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.local.agent_injection import agent_environment, agent_socket_paths, execute
from kinetoctl.output.console import say


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--agent-socket", type=click.Path(path_type=Path), help="Socket on which the daemon listens for agents.")
@click.argument("arguments", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@common_options
def command(agent_socket: Path | None, arguments: tuple[str, ...]) -> None:
    """Start a command whose Python processes can be traced.

    \b
    kinetoctl run -- python train.py --epochs 3
    kinetoctl run -- torchrun --nproc-per-node 8 train.py

    The command replaces kinetoctl: it has the same pid, gets the same signals and returns its own exit code. Every
    Python interpreter that it starts loads the agent, which waits for a trace request. The exit code is 127 if there
    is no such command and 126 if it cannot be executed.
    """
    environment = agent_environment(os.environ, agent_socket=agent_socket)
    sockets = agent_socket_paths(environment)
    if not current().quiet and not any(socket.exists() for socket in sockets):
        say(f"note: no daemon at {sockets[0]} yet; the agent connects once `kinetod` has started", err=True)
    execute(arguments, environment)
