"""Every KINETO_* environment variable that the agent reads, and where it looks for its daemon."""

import os
from typing import List, Mapping

AGENT = "KINETO_AGENT"
"""On (anything but empty and 0): the interpreter starts the agent. Explicitly off: `kinetoctl run` does not either."""

AGENT_SOCKET = "KINETO_AGENT_SOCKET"
"""Path of the daemon's agent socket. Unset: the places of `agent_socket_candidates`, in that order."""

AGENT_LOG = "KINETO_AGENT_LOG"
"""A file to which the agent appends what it does. Unset: the agent logs nothing at all."""

CUPTI_LIBRARY = "KINETO_CUPTI_LIBRARY"
"""Path of the libcupti to use. Unset: the one that the process has loaded, else the one that its torch brings."""

_SYSTEM_SOCKET = "/run/kineto/agent.sock"
_OFF = ("", "0")


def is_on(environ: Mapping[str, str] = os.environ, default: str = "0") -> bool:
    """Whether KINETO_AGENT asks for the agent. default: what an unset variable means."""
    return environ.get(AGENT, default) not in _OFF


def agent_socket_candidates(environ: Mapping[str, str] = os.environ, uid: int = -1) -> List[str]:
    """Where a daemon may listen, best first. uid: of this process, -1 for the effective one.

    The same rule as `kineto_protos.endpoints`, which the agent cannot import.
    """
    explicit = environ.get(AGENT_SOCKET)
    if explicit:
        return [explicit]
    candidates = [_SYSTEM_SOCKET]
    runtime_dir = environ.get("XDG_RUNTIME_DIR")
    if runtime_dir:
        candidates.append(runtime_dir + "/kineto/agent.sock")
    candidates.append("/tmp/kineto-%d/agent.sock" % (os.geteuid() if uid < 0 else uid))
    return candidates
