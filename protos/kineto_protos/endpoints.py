"""The daemon's default addresses; one rule for daemon and clients.

root:           /run/kineto/{kinetod.sock,agent.sock}
anybody else:   $XDG_RUNTIME_DIR/kineto/… or, without it, /tmp/kineto-<uid>/…
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

SYSTEM_PARENT = Path("/run")
SYSTEM_RUNTIME_DIR = SYSTEM_PARENT / "kineto"
RPC_SOCKET_NAME = "kinetod.sock"
AGENT_SOCKET_NAME = "agent.sock"
USUAL_PORT = 50051  # of a daemon that listens on TCP
KINETOD_NAMESPACE = "kineto"  # of its pods in Kubernetes, by default
HOST_FIELD = "{host}"
ADDRESS_FIELD = "{address}"  # the host's address in the cluster; its name if the cluster knows none
DEFAULT_TEMPLATE = f"{HOST_FIELD}:{USUAL_PORT}"
ADDRESS_VARIABLE = "KINETO_ADDRESS"
TLS_VARIABLES = ("KINETO_TLS_CA", "KINETO_TLS_CERT", "KINETO_TLS_KEY")  # PEM files, in this order
TLS_NAME_VARIABLE = "KINETO_TLS_NAME"
TOKEN_VARIABLE = "KINETO_TOKEN_FILE"  # noqa: S105  # a file with a Kubernetes token
HOST_ADDRESS_VARIABLE = "KINETO_HOST_ADDRESS"  # from a host's name to its daemon's address
CLIENT_VARIABLES = (ADDRESS_VARIABLE, *TLS_VARIABLES, TLS_NAME_VARIABLE, TOKEN_VARIABLE, HOST_ADDRESS_VARIABLE)


def runtime_dir(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which a daemon of this user (default: the caller) creates its sockets."""
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return SYSTEM_RUNTIME_DIR
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base, "kineto") if base else Path(f"/tmp/kineto-{uid}")


def rpc_address(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> str:
    """The gRPC target for a client: KINETO_ADDRESS, otherwise this user's daemon, otherwise the system's."""
    if explicit := environ.get(ADDRESS_VARIABLE):
        return explicit
    own = runtime_dir(uid, environ)
    system = SYSTEM_RUNTIME_DIR / RPC_SOCKET_NAME
    use_system = system.exists() and not _is_there(own, os.geteuid() if uid is None else uid)
    return f"unix:{system if use_system else own / RPC_SOCKET_NAME}"


def _is_there(folder: Path, uid: int) -> bool:
    """Whether a daemon of this user has a socket there; one in somebody else's folder does not count."""
    try:
        return folder.stat().st_uid == uid and (folder / RPC_SOCKET_NAME).exists()
    except OSError:
        return False


def parse_address(text: str) -> str:
    """Parses a gRPC target: unix:/path or host:port. Raises ValueError, saying how to write a host or path alone."""
    if re.fullmatch(r"unix:.+|(?:dns:///|ipv4:|ipv6:)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d{1,5}", text):
        return text
    meant = ""
    if re.fullmatch(r"[\w.-]+", text):
        meant = f"; the port is missing: use {text}:{USUAL_PORT}, unless its daemon has another port"
    elif text.startswith("/"):
        meant = f"; for a socket, use unix:{text}"
    raise ValueError(f"expected unix:/path/to/socket or host:port, got {text!r}{meant}")


def is_loopback(host: str) -> bool:
    """Whether only this host can reach this name or address."""
    import ipaddress  # it would slow down `kinetoctl --help`, which does not need it

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def vouched_for(path: Path, uid: int, run: Path = SYSTEM_PARENT) -> bool:
    """Whether the socket is in a folder of that user directly in /run, where only root creates folders."""
    if path.parent.parent != run:
        return False
    try:
        parent, status = run.lstat(), path.parent.lstat()
    except OSError:
        return False
    return status.st_uid == uid and parent.st_uid == 0 and not parent.st_mode & 0o022
