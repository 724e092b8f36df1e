"""Loads the agent into the Python processes of a command for `kinetoctl run`, through the environment only."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kineto_protos import endpoints

from kinetoctl.errors import AgentMissing, CommandNotFound, NotExecutable

AGENT_PACKAGE = "kineto_agent"
AGENT_VARIABLE = "KINETO_AGENT"
SOCKET_VARIABLE = "KINETO_AGENT_SOCKET"


def inject_folder() -> Path:
    """The folder whose sitecustomize.py starts the agent. The package is located, not imported."""
    spec = importlib.util.find_spec(AGENT_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        folder = Path(place, "bootstrap", "inject")
        if (folder / "sitecustomize.py").is_file():
            return folder
    raise AgentMissing(f"the package {AGENT_PACKAGE} is not installed beside kinetoctl")


def agent_environment(environ: Mapping[str, str], *, agent_socket: Path | None) -> dict[str, str]:
    """The environment of the command: every interpreter loads the agent first, unless KINETO_AGENT is 0."""
    paths = [str(inject_folder()), *filter(None, [environ.get("PYTHONPATH")])]
    changed = {AGENT_VARIABLE: "1", **environ, "PYTHONPATH": os.pathsep.join(paths)}
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
        raise CommandNotFound(f"{arguments[0]}: there is no such command") from exc
    except OSError as exc:
        raise NotExecutable(f"{arguments[0]}: cannot be executed: {exc.strerror}") from exc
