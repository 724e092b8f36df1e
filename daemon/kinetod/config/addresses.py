"""Addresses and socket paths in settings: what they are and how they are checked."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kineto_protos.endpoints import is_loopback

DYNOLOG_PORT = 1778  # dyno's default
_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with its NUL


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
        raise ValueError("contains a user or password; to prove the sender, use hooks.webhook_secret")
    if parts.fragment:
        raise ValueError("has a fragment (#…), which is never sent")
    try:
        parts.port  # noqa: B018  # raises
    except ValueError as exc:
        raise ValueError(f"{text!r:.80}: {exc}") from None
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{text!r:.80} would leave this host unencrypted; use https://…")
    return text
