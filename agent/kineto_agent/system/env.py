"""Every KINETO_* environment variable that the agent reads, and the places where it looks for its daemon.

A program that was started with rights that its caller lacks (`is_elevated`) ignores them, because they are the
caller's. LD_PRELOAD works the same way.
"""

import os
import struct
from typing import List, Mapping

AGENT = "KINETO_AGENT"
"""Any value except empty and 0: the interpreter starts the agent. 0: `kinetoctl run` does not start it either."""

AGENT_SOCKET = "KINETO_AGENT_SOCKET"
"""Path of the daemon's agent socket. Unset: the paths of `agent_socket_candidates` are tried in order."""

AGENT_LOG = "KINETO_AGENT_LOG"
"""File to which the agent appends its log. Unset: the agent does not log."""

CUPTI_LIBRARY = "KINETO_CUPTI_LIBRARY"
"""Path of the libcupti to use. Unset: the one that the process has loaded, else the one that comes with its torch."""

PTI_LIBRARY = "KINETO_PTI_LIBRARY"
"""Path of the libpti_view to use for Intel GPUs. Unset: the one that the process has loaded, else the one beside its
libsycl."""

ROCPROFILER_LIBRARY = "KINETO_ROCPROFILER_LIBRARY"
"""Path of the librocprofiler-sdk to use for AMD GPUs, if none is loaded. Unset: the one beside the process's
libamdhip64."""

_SYSTEM_SOCKET = "/run/kineto/agent.sock"
_OFF = ("", "0")
_AUXILIARY = struct.Struct("LL")  # type and value, ended by type 0
_AUXILIARY_BYTES = 4096  # usually about 320
_AT_SECURE = 23


def is_elevated(auxiliary_vector: str = "/proc/self/auxv") -> bool:
    """Whether this program has another user's or group's rights, or file capabilities (AT_SECURE)."""
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        return True
    from kineto_agent.system.descriptors import read_file  # _ctypes: only where it is needed

    try:
        data = read_file(auxiliary_vector, _AUXILIARY_BYTES)
    except OSError:
        return False
    whole = data[: len(data) - len(data) % _AUXILIARY.size]
    return any(kind == _AT_SECURE and value for kind, value in _AUXILIARY.iter_unpack(whole))


def is_on(environ: Mapping[str, str] = os.environ, default: str = "0") -> bool:
    """Whether KINETO_AGENT enables the agent. default: the value of an unset variable."""
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
