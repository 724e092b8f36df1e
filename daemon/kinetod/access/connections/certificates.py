"""The server's certificate and the authority of its clients, reread when the files change.

gRPC asks at each handshake, in a thread of its own, and each of its ports is told of a change. Files that do not
match, as in the middle of a renewal, and a certificate that is not valid now, are rejected: the certificates in use
stay until all files are consistent.
"""

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from kinetod.base.errors import StartError

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0  # how often to look at the files at most
MAX_FILE_BYTES = 1 << 20
_NOT_NOW = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files: the server's chain, its key, and the authorities that sign clients' certificates."""

    certificate: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True, slots=True)
class _Pem:
    certificate: bytes
    key: bytes
    client_ca: bytes

    def config(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)


class Certificates:
    """The certificates in force."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the files. Blocks. Raises StartError."""
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._stamp = self._rejected = self._stamps()
        try:
            self._pem = _read(files)
        except (OSError, ValueError) as exc:
            raise StartError(f"TLS cannot be set up: {exc}") from exc
        if problem := _validity_problem(self._pem):
            log.warning("clients will refuse %s: %s", files.certificate, problem)

    def credentials(self, *, of_clients: bool) -> grpc.ServerCredentials:
        """The credentials for a port. of_clients: require a certificate signed by the authority; else ask for none."""
        given = self._pem

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Returns certificates that this port has not had yet, if any; gRPC calls it in its own threads."""
            nonlocal given
            self.look()
            if given is self._pem:
                return None
            given = self._pem
            return given.config()

        return grpc.dynamic_ssl_server_credentials(
            given.config(),
            fetch,  # type: ignore[arg-type]  # None is documented: what is in use stays
            require_client_authentication=of_clients,
        )

    def look(self) -> bool:
        """Rereads changed files. Returns whether the certificates in force changed. Blocks."""
        with self._lock:
            now = self._clock()
            if now - self._looked < LOOK_PERIOD_S:
                return False
            self._looked = now
            stamp = self._stamps()
            if stamp == self._stamp:
                return False
            try:
                pem = _read(self._files)
                if pem.certificate != self._pem.certificate and (problem := _validity_problem(pem)):
                    raise ValueError(f"clients would refuse {self._files.certificate}: {problem}")
            except (OSError, ValueError) as exc:
                if stamp != self._rejected:
                    log.warning("the new TLS files were rejected; the previous ones stay in use: %s", exc)
                self._rejected = stamp
                return False  # and are looked at again: they may be half-way
            self._stamp = stamp
            changed, self._pem = pem != self._pem, pem
            if changed:
                log.info("new TLS certificates are in use, read from %s", self._files.certificate)
            return changed

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        def stamp(path: Path) -> tuple[int, int, int]:
            try:
                status = path.stat()
            except OSError:
                return (0, 0, 0)
            return (status.st_ino, status.st_mtime_ns, status.st_size)

        return tuple(map(stamp, (self._files.certificate, self._files.key, self._files.client_ca)))


def _read(files: TlsFiles) -> _Pem:
    """Reads the files. Raises OSError, and ValueError, also if certificate and key do not match."""
    pem = _Pem(*(_content(path) for path in (files.certificate, files.key, files.client_ca)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=pem.client_ca.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as exc:
        raise ValueError(f"{files.client_ca} contains no certificates ({_words(exc)})") from exc
    try:
        _load(context, pem)
    except (ssl.SSLError, ValueError) as exc:
        raise ValueError(
            f"{files.certificate} and {files.key} are not a certificate and its matching key ({_words(exc)})"
        ) from exc
    return pem


def _validity_problem(pem: _Pem) -> str:
    """Returns why the server's certificate is not valid now, as a client that trusts it finds in a handshake; or ""."""
    here, there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(here, pem)
    there.check_hostname = False
    there.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its authority is the clients' matter
    there.load_verify_locations(cadata=pem.certificate.decode("ascii", "replace"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = here.wrap_bio(to_server, to_client, server_side=True)
    client = there.wrap_bio(to_client, to_server)
    try:
        for end in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as exc:
        return exc.verify_message if exc.verify_code in _NOT_NOW else ""
    return ""


def _load(context: ssl.SSLContext, pem: _Pem) -> None:
    with contextlib.ExitStack() as stack:
        certificate, key = (_in_memory(data, stack) for data in (pem.certificate, pem.key))
        context.load_cert_chain(certificate, key, password=_no_password)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    return data


def _in_memory(data: bytes, stack: contextlib.ExitStack) -> str:
    """A path for the ssl module, which reads keys only from files; so what is checked is what is used."""
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    os.write(fd, data)
    return f"/proc/self/fd/{fd}"


def _no_password() -> str:
    raise ValueError("the key is protected by a passphrase; store it without one, readable only by the daemon")


def _words(exc: Exception) -> str:
    return getattr(exc, "reason", None) or str(exc)
