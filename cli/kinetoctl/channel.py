"""Connections to daemons: Unix sockets and loopback as they are, anything else with TLS.

Who calls is known by the socket or by the client's certificate; on Kubernetes it may be known by a token, which goes
with each call: to addresses that `show_token` names, and where KINETO_TOKEN_FILE is set to all but Unix sockets.
"""

import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from kineto_protos import endpoints

from kinetoctl import errors

Options = Sequence[tuple[str, int | str]]
Token = Callable[[], str]
CA, CERTIFICATE, _KEY = endpoints.TLS_VARIABLES
_SCHEMES = ("dns:///", "ipv4:", "ipv6:")
_tokens: dict[str, Token] = {}


def show_token(address: str, token: Token) -> None:
    """Lets channels to this address that are opened from now on show a bearer token, asked for at each call."""
    _tokens[address] = token


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
    token = _token(address, environ)
    if address.startswith("unix:"):
        return options, _with_token(grpc.local_channel_credentials(grpc.LocalConnectionType.UDS), token)
    if not any(files.values()) and _is_loopback(address):
        return options, _with_token(grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP), token)
    if token is not None and files[CA] and not files[CERTIFICATE]:
        return _named(options, environ), _with_token(grpc.ssl_channel_credentials(_content(CA, files[CA])), token)
    if missing := [name for name, path in files.items() if not path]:
        raise errors.UsageProblem(
            f"the daemon at {address} is called with certificates only: set {', '.join(missing)} to PEM files, "
            "or forward its Unix socket with ssh -L"
        )
    authority, certificate, key = (_content(name, path) for name, path in files.items())
    return _named(options, environ), grpc.ssl_channel_credentials(authority, key, certificate)


def _named(options: Options, environ: Mapping[str, str]) -> Options:
    """With the name that the server's certificate has, where it is not the address's."""
    server_name = environ.get(endpoints.TLS_NAME_VARIABLE)
    return (*options, ("grpc.ssl_target_name_override", server_name)) if server_name else options


def _token(address: str, environ: Mapping[str, str]) -> Token | None:
    path = "" if address.startswith("unix:") else environ.get(endpoints.TOKEN_VARIABLE, "")
    return _tokens.get(address) or (
        (lambda: _content(endpoints.TOKEN_VARIABLE, path).decode().strip()) if path else None
    )


class _Bearer(grpc.AuthMetadataPlugin):
    """Sends a token with each call. gRPC lets it go over secure and over local connections only."""

    def __init__(self, token: Token) -> None:
        self._token = token

    def __call__(self, _context: grpc.AuthMetadataContext, answer: grpc.AuthMetadataPluginCallback) -> None:
        try:
            metadata = (("authorization", f"Bearer {self._token()}"),)
        except errors.CliError as exc:
            answer((), exc)
        else:
            answer(metadata, None)


def _with_token(channel: grpc.ChannelCredentials, token: Token | None) -> grpc.ChannelCredentials | None:
    """None: the connection needs no credentials, since there is no token."""
    if token is None:
        return None
    return grpc.composite_channel_credentials(channel, grpc.metadata_call_credentials(_Bearer(token)))


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
