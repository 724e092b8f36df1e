"""`kinetod`: the command line of the daemon."""

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from kineto_protos.options import Parsed
from kineto_protos.units import parse_duration_ns, parse_size_bytes

from kinetod import __version__
from kinetod.config import (
    Config,
    ListenAddress,
    checked_socket_path,
    default_agent_socket,
    default_listen,
    default_state_dir,
    parse_listen,
)
from kinetod.errors import StartError

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
EXIT_CANNOT_START = 1


def _positive(_ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value <= 0:
        raise click.BadParameter("must be greater than 0", param=param)
    return value


def _not_negative(_ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value < 0:
        raise click.BadParameter("must be 0 or more", param=param)
    return value


_option = partial(click.option, show_envvar=True)
_size = partial(_option, type=Parsed("size", parse_size_bytes))
_duration = partial(_option, type=Parsed("duration", parse_duration_ns), callback=_positive)


@click.command(context_settings={"auto_envvar_prefix": "KINETOD", "show_default": True, "max_content_width": 100})
@_option(
    "--listen",
    type=Parsed("address", parse_listen),
    multiple=True,
    metavar="ADDRESS",
    help="Where clients connect: unix:/path, or host:port on loopback (open to every user of this host). "
    "Repeatable.  [default: unix:<runtime dir>/kinetod.sock]",
)
@_option(
    "--agent-socket",
    type=Parsed("path", checked_socket_path),
    help="Where agents connect.  [default: <runtime dir>/agent.sock]",
)
@_option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where captures are stored.  [default: /var/lib/kineto for root, else ~/.local/state/kineto]",
)
@_size(
    "--buffer-limit",
    default="128MiB",
    callback=_positive,
    help="Recording buffers per target unless a request says otherwise.",
)
@_duration("--max-duration", default="10min", help="Longest capture that may be asked for.")
@_option("--max-captures", type=click.IntRange(min=1), default=16, help="Captures that may run at the same time.")
@_size(
    "--max-trace-bytes",
    default="8GiB",
    callback=_positive,
    help="Raw bytes per target after which a capture is stopped.",
)
@_size(
    "--min-free-bytes",
    default="1GiB",
    help="Space to leave free on the disk of the state folder; captures stop at it.",
)
@_duration("--agent-deadline", default="10s", help="How long an agent may take to answer before its target has failed.")
@_duration("--process-deadline", default="30s", help="How long an agent may take to stop its sources.")
@_duration("--decode-deadline", default="10min", help="How long decoding one target may take.")
@_option(
    "--decode-workers",
    type=click.IntRange(min=1, max=64),
    default=min(max(2, os.cpu_count() or 2), 4),
    show_default="2 to 4 by CPU count",
    help="Processes that decode traces.",
)
@_option(
    "--no-attach",
    is_flag=True,
    help="Only trace processes that have an agent; never bring one into a process.",
)
@_duration("--attach-deadline", default="10s", help="How long bringing an agent into a process may take.")
@_option(
    "--keep-agent",
    type=Parsed("duration", parse_duration_ns),
    callback=_not_negative,
    default="10min",
    help="How long an agent that was brought in stays after its last capture; 0: it leaves at once.",
)
@_option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    help="What to log to standard error.",
)
@click.version_option(__version__, prog_name="kinetod")
def command(
    listen: tuple[ListenAddress, ...], agent_socket: Path | None, state_dir: Path | None, **options: Any
) -> int:
    """Trace running processes on demand.

    Agents in training processes connect to the agent socket, clients such as kinetoctl to the listening
    address. Without options everything lies in this user's own folders; run by root it serves all users'
    processes.
    """
    logging.basicConfig(stream=sys.stderr, level=options["log_level"].upper(), format=_LOG_FORMAT)
    for chatty in ("grpc", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    config = Config(
        listen=listen or (default_listen(),),
        agent_socket=agent_socket or default_agent_socket(),
        state_dir=(state_dir or default_state_dir()).absolute(),
        buffer_limit_bytes=options["buffer_limit"],
        max_duration_ns=options["max_duration"],
        max_captures=options["max_captures"],
        max_trace_bytes=options["max_trace_bytes"],
        min_free_bytes=options["min_free_bytes"],
        agent_deadline_ns=options["agent_deadline"],
        process_deadline_ns=options["process_deadline"],
        decode_deadline_ns=options["decode_deadline"],
        decode_workers=options["decode_workers"],
        attach=not options["no_attach"],
        attach_deadline_ns=options["attach_deadline"],
        keep_agent_ns=options["keep_agent"],
    )
    from kinetod.app import run  # gRPC and protobuf are not needed for --help and usage errors

    return run(config)


def main() -> int:
    """Entry point; the exit status is 0 after a clean stop, 1 if the daemon cannot start, 2 for usage errors."""
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except click.Abort:
        return 130
    except StartError as exc:
        click.echo(f"kinetod: {exc}", err=True)
        return EXIT_CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
