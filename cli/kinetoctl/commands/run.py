"""`kinetoctl run`: starts a command with the agent in its environment."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click
from kineto_protos import endpoints
from kineto_trace.base.install_advice import reinstall_advice

from kinetoctl.base.common_options import common_options, current
from kinetoctl.errors import AgentMissing, CommandNotFound, NotExecutable
from kinetoctl.output.console import say

AGENT_PACKAGE = "kineto_agent"
AGENT_VARIABLE = "KINETO_AGENT"
SOCKET_VARIABLE = "KINETO_AGENT_SOCKET"
ROCM_VARIABLE = "ROCP_TOOL_LIBRARIES"  # rocprofiler-sdk's: libraries that it asks for clients
ROCM_DEVICE = Path("/dev/kfd")  # of AMD GPUs


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


def _agent_folders() -> list[Path]:
    """Where the agent's package is. It is located, not imported."""
    spec = importlib.util.find_spec(AGENT_PACKAGE)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def inject_folder() -> Path:
    """The folder whose sitecustomize.py starts the agent."""
    for place in _agent_folders():
        folder = place / "bootstrap" / "inject"
        if (folder / "sitecustomize.py").is_file():
            return folder
    raise AgentMissing(f"the package {AGENT_PACKAGE} is not installed alongside kinetoctl: {reinstall_advice()}")


def rocm_tools(environ: Mapping[str, str]) -> str:
    """ROCP_TOOL_LIBRARIES with our tool library behind those that are named already; "": there is none to name.

    rocprofiler-sdk before 1.3.2 takes clients only while it is configured. It drops the last entry of a list that has
    no colon at its end.
    """
    named = [path for path in environ.get(ROCM_VARIABLE, "").split(":") if path]
    for folder in _agent_folders():
        library = folder / "_native" / "libkineto_rocprofiler.so"
        if library.is_file() and ":" not in str(library):
            return ":".join([*(path for path in named if path != str(library)), str(library), ""])
    return ""


def agent_environment(
    environ: Mapping[str, str], *, agent_socket: Path | None, rocm_device: Path = ROCM_DEVICE
) -> dict[str, str]:
    """The environment of the command: every interpreter loads the agent first, unless KINETO_AGENT is 0.

    Where there is an AMD GPU, rocprofiler-sdk is told of the agent's client, too.
    """
    paths = [str(inject_folder()), *filter(None, [environ.get("PYTHONPATH")])]
    changed = {AGENT_VARIABLE: "1", **environ, "PYTHONPATH": os.pathsep.join(paths)}
    tools = rocm_tools(environ) if rocm_device.exists() and changed[AGENT_VARIABLE] not in ("", "0") else ""
    if tools:
        changed[ROCM_VARIABLE] = tools
    if agent_socket is not None:
        changed[SOCKET_VARIABLE] = str(agent_socket.absolute())
    return changed


def agent_socket_paths(environ: Mapping[str, str]) -> list[Path]:
    """Where the agent will look for the daemon."""
    explicit = environ.get(SOCKET_VARIABLE)
    if explicit:
        return [Path(explicit)]
    folders = (endpoints.runtime_dir(environ=environ), endpoints.SYSTEM_RUNTIME_DIR)
    return [folder / endpoints.AGENT_SOCKET_NAME for folder in dict.fromkeys(folders)]


def execute(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with the command."""
    try:
        os.execvpe(arguments[0], list(arguments), dict(environment))  # noqa: S606  # that is the command's purpose
    except FileNotFoundError as exc:
        raise CommandNotFound(f"{arguments[0]}: no such command") from exc
    except OSError as exc:
        raise NotExecutable(f"{arguments[0]}: cannot be executed: {exc.strerror}") from exc
