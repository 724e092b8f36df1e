"""Connections to daemons: Unix sockets and loopback as they are, anything else with TLS on both sides."""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from kineto_protos import endpoints

from kinetoctl import errors

Options = Sequence[tuple[str, int | str]]
_SCHEMES = ("dns:///", "ipv4:", "ipv6:")


def open_channel(address: str, options: Options, environ: Mapping[str, str] = os.environ) -> grpc.Channel:
    """A channel; nothing is connected yet. Raises UsageProblem."""
    options, credentials = _security(address, options, environ)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(address: str, options: Options, environ: Mapping[str, str] = os.environ) -> grpc.aio.Channel:
    """Likewise, for the running event loop. Raises UsageProblem."""
    options, credentials = _security(address, options, environ)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _security(
    address: str, options: Options, environ: Mapping[str, str]
) -> tuple[Options, grpc.ChannelCredentials | None]:
    """The options, and the certificates that a call of this address needs. Raises UsageProblem."""
    files = {name: environ.get(name, "") for name in endpoints.TLS_VARIABLES}
    if address.startswith("unix:") or (not any(files.values()) and _is_loopback(address)):
        return options, None
    if missing := [name for name, path in files.items() if not path]:
        raise errors.UsageProblem(
            f"the daemon at {address} is called with certificates only: set {', '.join(missing)} to PEM files, "
            "or forward its Unix socket with ssh -L"
        )
    authority, certificate, key = (_content(name, path) for name, path in files.items())
    if server_name := environ.get(endpoints.TLS_NAME_VARIABLE):
        options = (*options, ("grpc.ssl_target_name_override", server_name))
    return options, grpc.ssl_channel_credentials(authority, key, certificate)


def _content(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise errors.UsageProblem(f"{name}: {path} cannot be read: {exc.strerror}") from exc


def _is_loopback(address: str) -> bool:
    for scheme in _SCHEMES:
        address = address.removeprefix(scheme)
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
