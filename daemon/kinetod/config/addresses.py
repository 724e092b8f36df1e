"""Addresses, files and sockets in settings: their defaults and checks."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from kineto_protos import endpoints
from kineto_protos.endpoints import is_loopback

DYNOLOG_PORT = 1778  # dyno's default
_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with its NUL
OTLP_PATH = "/v1development/profiles"
PYROSCOPE_PATH = "/push.v1.PusherService/Push"
_EXPECTED = "otlp+https://host:4318, otlp+grpcs://host:4317 or pyroscope+https://host:4040"


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


def parse_dynolog_rpc(text: str) -> ListenAddress:
    """Parses `loopback`, `unix:/path` or `host:port`, an address of this host. Raises ValueError."""
    if text == "loopback":
        return ListenAddress(host="localhost", port=DYNOLOG_PORT)
    return parse_listen(text) if text.startswith("unix:") else parse_metrics_listen(text)


def checked_socket_path(text: str) -> Path:
    """Checks for an absolute path that fits into a socket address. Raises ValueError."""
    path = Path(text)
    if not path.is_absolute():
        raise ValueError(f"expected an absolute socket path, got {text!r}")
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise ValueError(f"the socket path {text!r} is longer than {_SOCKET_PATH_BYTES} bytes")
    return path


def checked_webhook(text: str) -> str:
    """Checks a webhook: an https address, or http on this host. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http") or not parts.hostname or not text.isprintable() or " " in text:
        raise ValueError(f"expected https://host/path, got {text!r:.80}")
    if "@" in parts.netloc:
        raise ValueError("contains a user or password; to authenticate the sender, use hooks.webhook_secret")
    if parts.fragment:
        raise ValueError("has a fragment (#…), which is never sent")
    try:
        parts.port  # noqa: B018  # raises
    except ValueError as exc:
        raise ValueError(f"{text!r:.80}: {exc}") from None
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{text!r:.80} would send data to another host unencrypted; use https://…")
    return text


SYSTEM_CONFIG_DIR = Path("/etc/kinetod")
CONFIG_FILE_NAME = "config.toml"
HELPER_SOCKET = Path("/run/kinetod-attach/attach.sock")  # created by kinetod-attach.socket
COUNTERS_SOCKET = Path("/run/kinetod-counters/counters.sock")  # created by kinetod-counters.socket
WRITER_SOCKET = Path("/run/kinetod-writer/writer.sock")  # created by kinetod-writer.socket, if it is enabled


def default_listen(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> ListenAddress:
    """The Unix socket in this user's runtime folder."""
    return ListenAddress(path=_runtime_dir(uid, environ) / endpoints.RPC_SOCKET_NAME)


def default_agent_socket(uid: int | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket that the agents of this user's processes connect to (root: everybody's)."""
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

    A user's own daemon does not use the system's file: the sockets and folders in it belong to somebody else.
    """
    if given := _service_dir("CONFIGURATION_DIRECTORY", "kinetod", environ):
        return given / CONFIG_FILE_NAME
    if (os.getuid() if uid is None else uid) == 0:
        return SYSTEM_CONFIG_DIR / CONFIG_FILE_NAME
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "kinetod" / CONFIG_FILE_NAME


def default_helper_socket(uid: int | None = None, path: Path = HELPER_SOCKET) -> Path | None:
    """The socket of the installed attach helper if this user may use it; None for root, who does not need it."""
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


# The checked address that profiles are pushed to: `hooks.profiles`. Pure.
#
# The scheme determines the format and the transport:
# - otlp+https://host:4318, otlp+http://…: OTLP over HTTP with protobuf. As with OTEL_EXPORTER_OTLP_ENDPOINT, the path
#   is a prefix of the protocol's path for profiles
# - otlp+grpcs://host:4317, otlp+grpc://…: OTLP over gRPC
# - pyroscope+https://host:4040, pyroscope+http://…: Pyroscope's push call
# Schemes without TLS are for this host only, like webhooks.
class ProfileForm(StrEnum):
    """The format and transport of profiles."""

    OTLP_HTTP = "otlp-http"
    OTLP_GRPC = "otlp-grpc"
    PYROSCOPE = "pyroscope"


_SCHEMES = {
    "otlp+https": (ProfileForm.OTLP_HTTP, "https"),
    "otlp+http": (ProfileForm.OTLP_HTTP, "http"),
    "otlp+grpcs": (ProfileForm.OTLP_GRPC, "https"),
    "otlp+grpc": (ProfileForm.OTLP_GRPC, "http"),
    "pyroscope+https": (ProfileForm.PYROSCOPE, "https"),
    "pyroscope+http": (ProfileForm.PYROSCOPE, "http"),
}
_PATHS = {ProfileForm.OTLP_HTTP: OTLP_PATH, ProfileForm.PYROSCOPE: PYROSCOPE_PATH, ProfileForm.OTLP_GRPC: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAddress:
    """One receiver. url: with the complete path; for gRPC host:port."""

    form: ProfileForm
    url: str
    secure: bool


def parse_profiles(text: str) -> ProfileAddress:
    """Parses an address. Raises ValueError, which says what is wrong."""
    parts = urlsplit(text)
    if parts.scheme not in _SCHEMES or not parts.hostname or not text.isprintable() or " " in text:
        raise ValueError(f"expected {_EXPECTED}, got {text!r:.80}")
    form, scheme = _SCHEMES[parts.scheme]
    if "@" in parts.netloc:
        raise ValueError("contains a user or password; put an Authorization header in hooks.profiles_headers")
    if parts.query or parts.fragment:
        raise ValueError("has a query or fragment (?… or #…); put keys in hooks.profiles_headers")
    try:
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{text!r:.80}: {exc}") from None
    if scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{text!r:.80} would send data to another host unencrypted; use {parts.scheme}s://…")
    if form is ProfileForm.OTLP_GRPC:
        if port is None or parts.path.strip("/"):
            raise ValueError(f"expected {parts.scheme}://host:port without a path, got {text!r:.80}")
        return ProfileAddress(form=form, url=parts.netloc, secure=scheme == "https")
    path = parts.path.rstrip("/")
    path = path if path.endswith(_PATHS[form]) else path + _PATHS[form]
    return ProfileAddress(form=form, url=f"{scheme}://{parts.netloc}{path}", secure=scheme == "https")


def checked_profiles(text: str) -> str:
    """Checks an address; "" is none. Raises ValueError."""
    if text:
        parse_profiles(text)
    return text
