"""The daemon's settings as one frozen value, the value in force, and the default places of files.

The rows that say how each field is set are in `settings_table`.
"""

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kineto_protos import endpoints

from kinetod.permissions.role_grants import Grant
from kinetod.permissions.role_policy import Role

_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with its NUL
_SECOND_NS = 10**9
_DAY_NS = 86_400 * _SECOND_NS
SYSTEM_CONFIG_DIR = Path("/etc/kinetod")
CONFIG_FILE_NAME = "config.toml"
HELPER_SOCKET = Path("/run/kinetod-attach/attach.sock")  # as kinetod-attach.socket makes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """A gRPC address: a Unix socket path, or a host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is a host and port that only this host can reach."""
        return self.path is None and is_loopback(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set. Sizes are bytes, durations nanoseconds."""

    listen: tuple[ListenAddress, ...]
    agent_socket: Path
    state_dir: Path
    buffer_limit_bytes: int = 128 << 20
    max_duration_ns: int = 600 * _SECOND_NS
    max_captures: int = 32
    max_trace_bytes: int = 8 << 30
    min_free_bytes: int = 1 << 30
    agent_deadline_ns: int = 10 * _SECOND_NS
    process_deadline_ns: int = 30 * _SECOND_NS
    decode_deadline_ns: int = 600 * _SECOND_NS
    decode_workers: int = 2
    decode_memory_bytes: int = 1 << 30  # private memory of one decode
    decode_sandbox: str = "available"
    attach: bool = True  # whether processes without an agent get one
    attach_deadline_ns: int = 10 * _SECOND_NS
    keep_agent_ns: int = 600 * _SECOND_NS  # how long an attached agent stays after its last capture
    helper_socket: Path | None = None  # of the attach helper service; None: this daemon attaches by itself
    log_level: str = "info"
    min_free_percent: int = 0  # of the disk; min_free_bytes has it already, where that is more
    start_free_bytes: int = 256 << 20  # beyond min_free_bytes, for a capture to begin
    max_age_ns: int = 30 * _DAY_NS  # of captures; 0: no limit, as with the sizes below
    max_store_bytes: int = 100 << 30
    max_user_bytes: int = 0
    user_share_percent: int = 25  # of the store, that each user is sure of; 0: of nothing
    max_user_captures: int = 5000
    max_entry_age_ns: int = 365 * _DAY_NS  # of uploaded captures that are no longer here
    retention_interval_ns: int = 600 * _SECOND_NS
    keep_local: bool = True  # also once it is uploaded
    upload_url: str = ""  # empty: no uploads
    upload_credentials: Path | None = None
    upload_endpoint: str = ""
    upload_parallel: int = 2
    upload_bytes_per_second: int = 0  # 0: no limit
    upload_retry_pause_ns: int = 600 * _SECOND_NS  # the longest one
    upload_timeout_ns: int = 60 * _SECOND_NS
    hook_on: tuple[str, ...] = ("all",)
    hook_command: tuple[str, ...] = ()  # argv; empty: none
    hook_webhooks: tuple[str, ...] = ()
    hook_secret: Path | None = None  # None: webhooks are not signed
    hook_ca: Path | None = None  # None: the system's authorities
    hook_timeout_ns: int = 30 * _SECOND_NS
    hook_retry_ns: int = 600 * _SECOND_NS
    hook_parallel: int = 2
    metrics_listen: ListenAddress | None = None  # None: no metrics are served
    metrics_allow_remote: bool = False
    gpu_jobs_dir: Path = Path("/run/kinetod-slurm")  # deploy/slurm/Prolog makes it
    local_roles: tuple[Role, ...] = (Role.OWN, Role.JOBS)  # of every user of this host
    admin_users: tuple[str, ...] = ()
    admin_groups: tuple[str, ...] = ()
    viewer_users: tuple[str, ...] = ()
    viewer_groups: tuple[str, ...] = ()
    certificates: Mapping[str, Grant] = field(default_factory=dict)  # by URI:…, DNS:… or CN:…
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    loopback_without_tls: bool = False
    kubernetes: bool = False  # whether callers with a Kubernetes token are served
    kubernetes_listen: ListenAddress = ListenAddress(host="127.0.0.1", port=50052)
    kubernetes_audiences: tuple[str, ...] = ()  # empty: the API server's own
    audit_file: Path | None = None  # None: the journal
    requests_per_second: int = 50  # of one caller
    max_connections: int = 64  # of one user or remote address
    max_calls_per_user: int = 64  # at a time
    max_watches_per_user: int = 4  # of the host
    max_streams_per_user: int = 16  # of stored files
    max_captures_per_user: int = 8
    quota_per_user_bytes: int = 0  # 0: no limit
    pod_resources: bool = False  # whether the kubelet is asked
    kubelet_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    node_name: str = ""  # as the API server knows this host
    account_dir: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the disk for a capture to begin."""
        return self.min_free_bytes + self.start_free_bytes

    @property
    def has_tls(self) -> bool:
        """Whether certificates are configured."""
        return all((self.tls_certificate, self.tls_key, self.tls_client_ca))


class Settings:
    """The configuration in force. Only a reload replaces it, as a whole, on the event loop.

    Read `current` at every use: a stored value does not change with a reload.
    """

    def __init__(self, config: Config) -> None:
        self.current = config
        self._subscribers: list[Callable[[Config], None]] = []

    def subscribe(self, changed: Callable[[Config], None]) -> None:
        """Calls `changed` with every later configuration, on the event loop; it must not block or raise."""
        self._subscribers.append(changed)

    def replace(self, config: Config) -> None:
        """Puts another configuration in force and tells the subscribers."""
        self.current = config
        for changed in self._subscribers:
            changed(config)


def parse_listen(text: str) -> ListenAddress:
    """Parses `unix:/path` or `host:port`. Raises ValueError, which says what is wrong."""
    if text.startswith("unix:"):
        return ListenAddress(path=checked_socket_path(text.removeprefix("unix:")))
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected unix:/path or host:port, got {text!r}")
    return ListenAddress(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def parse_metrics_listen(text: str) -> ListenAddress:
    """Parses `host:port`, an address of this host. Raises ValueError, which says what is wrong."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdecimal()) or not 0 <= int(port) <= 65535:
        raise ValueError(f"expected host:port, for example 127.0.0.1:9417, got {text!r}")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"expected an IP address of this host before the port, got {text!r}") from None
    return ListenAddress(host=host, port=int(port))


def metrics_problem(config: Config) -> str:
    """Why metrics.listen is refused; "" if it is not."""
    address = config.metrics_listen
    if address is None or config.metrics_allow_remote or is_loopback(address.host):
        return ""
    return (
        f"{address} can be reached from other hosts and does not authenticate them; listen on 127.0.0.1, or set "
        "metrics.allow_remote = true"
    )


def is_loopback(host: str) -> bool:
    """Whether only this host can reach this name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_socket_path(text: str) -> Path:
    """Checks for an absolute path that fits into a socket address. Raises ValueError."""
    path = Path(text)
    if not path.is_absolute():
        raise ValueError(f"expected an absolute socket path, got {text!r}")
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise ValueError(f"the socket path {text!r} is longer than {_SOCKET_PATH_BYTES} bytes")
    return path


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


def serves_everybody(config: Config) -> bool:
    """Whether the daemon can reach the processes of all users, or only those of its own."""
    return os.geteuid() == 0 or config.helper_socket is not None


def _runtime_dir(uid: int | None, environ: Mapping[str, str]) -> Path:
    return _service_dir("RUNTIME_DIRECTORY", "kineto", environ) or endpoints.runtime_dir(uid, environ)


def _service_dir(variable: str, name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of this name among those that systemd created for this service, ignoring other services."""
    folders = map(Path, filter(None, environ.get(variable, "").split(":")))
    return next((folder for folder in folders if folder.name == name and folder.is_absolute()), None)
