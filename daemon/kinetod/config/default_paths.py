"""Where files and sockets are if nothing is configured: in root's, the service's or the user's own folders."""

import os
from collections.abc import Mapping
from pathlib import Path

from kineto_protos import endpoints

from kinetod.config.addresses import ListenAddress

SYSTEM_CONFIG_DIR = Path("/etc/kinetod")
CONFIG_FILE_NAME = "config.toml"
HELPER_SOCKET = Path("/run/kinetod-attach/attach.sock")  # as kinetod-attach.socket makes it
COUNTERS_SOCKET = Path("/run/kinetod-counters/counters.sock")  # as kinetod-counters.socket makes it
WRITER_SOCKET = Path("/run/kinetod-writer/writer.sock")  # as kinetod-writer.socket makes it, if it is enabled


def default_listen(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> ListenAddress:
    """The Unix socket in this user's runtime folder."""
    return ListenAddress(path=_runtime_dir(uid, environ) / endpoints.RPC_SOCKET_NAME)


def default_agent_socket(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the agents of this user's processes connect (root: everybody's)."""
    return _runtime_dir(uid, environ) / endpoints.AGENT_SOCKET_NAME


def default_state_dir(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The service's StateDirectory; root: /var/lib/kineto; others: $XDG_STATE_HOME/kineto or ~/.local/state/kineto."""
    if given := _service_dir("STATE_DIRECTORY", "kineto", environ):
        return given
    if (os.getuid() if uid is None else uid) == 0:
        return Path("/var/lib/kineto")
    base = environ.get("XDG_STATE_HOME")
    return Path(base, "kineto") if base else Path.home() / ".local/state/kineto"


def default_config_file(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The service's ConfigurationDirectory; root: /etc/kinetod; others: $XDG_CONFIG_HOME/kinetod or ~/.config/kinetod.

    A daemon of one's own does not take the system's file: the sockets and folders in it are not its own.
    """
    if given := _service_dir("CONFIGURATION_DIRECTORY", "kinetod", environ):
        return given / CONFIG_FILE_NAME
    if (os.getuid() if uid is None else uid) == 0:
        return SYSTEM_CONFIG_DIR / CONFIG_FILE_NAME
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "kinetod" / CONFIG_FILE_NAME


def default_helper_socket(uid: int | None = None, path: Path = HELPER_SOCKET) -> Path | None:
    """The socket of the installed attach helper if this user may use it; None for root, who needs none."""
    uid = os.geteuid() if uid is None else uid
    return path if uid != 0 and os.access(path, os.W_OK, effective_ids=True) else None


def default_counters_socket(path: Path = COUNTERS_SOCKET) -> Path | None:
    """The socket of the installed kinetod-counters if this user may use it, which root may, too."""
    return path if os.access(path, os.W_OK, effective_ids=True) else None


def _runtime_dir(uid: int | None, environ: Mapping[str, str]) -> Path:
    return _service_dir("RUNTIME_DIRECTORY", "kineto", environ) or endpoints.runtime_dir(uid, environ)


def _service_dir(variable: str, name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of this name among those that systemd created for this service, ignoring other services."""
    folders = map(Path, filter(None, environ.get(variable, "").split(":")))
    return next((folder for folder in folders if folder.name == name and folder.is_absolute()), None)
