"""Who looks at a page: a user of the daemon's host whom a proxy names, or whoever a certificate stands for."""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kineto_protos.page_users import CERTIFICATE_KEY, CERTIFICATE_NAME, MAX_NAMES, USER_KEY, USER_NAME

_USER_NAME, _CERTIFICATE_NAME = re.compile(USER_NAME), re.compile(CERTIFICATE_NAME)
_ALTERNATIVES_OID = b"\x06\x03\x55\x1d\x11"  # subjectAltName, 2.5.29.17, as DER has it


class UnknownUser(Exception):
    """The connection names nobody; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUser:
    """One of both: a user's name, or the names of a certificate in the order in which they count."""

    user: str = ""
    certificates: tuple[str, ...] = ()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What tells the daemon for whom a call is made."""
        return ((USER_KEY, self.user),) if self.user else tuple((CERTIFICATE_KEY, name) for name in self.certificates)

    def __str__(self) -> str:
        return self.user or self.certificates[0]


def of_header(values: Sequence[str]) -> PageUser:
    """The user whom a proxy names in all headers of that name. Raises UnknownUser."""
    if len(values) != 1:
        raise UnknownUser(f"the proxy must name the user in exactly one header; there are {len(values)}")
    if not _USER_NAME.fullmatch(values[0]):
        raise UnknownUser("the name of the user is none that a host can have")
    return PageUser(user=values[0])


def of_certificate(certificate: Mapping[str, Any], der: bytes) -> PageUser:
    """The user of a verified certificate, as `SSLSocket.getpeercert` has it in both forms. Raises UnknownUser.

    The common name counts only without alternative names of any kind, as for the daemon's own clients.
    """
    found: Sequence[tuple[str, str]] = certificate.get("subjectAltName", ())
    names = [f"{kind}:{value}" for wanted in ("URI", "DNS") for kind, value in found if kind == wanted]
    if _ALTERNATIVES_OID not in der:
        names = [f"CN:{value}" for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if not names or len(names) > MAX_NAMES or not all(map(_CERTIFICATE_NAME.fullmatch, names)):
        raise UnknownUser("the certificate has no name of a kind that counts (URI, DNS, or CN without others)")
    return PageUser(certificates=tuple(names))


def of_tls(connection: ssl.SSLSocket) -> PageUser:
    """The user at the other end. Raises UnknownUser."""
    certificate, der = connection.getpeercert(), connection.getpeercert(binary_form=True)
    if not certificate or not der:
        raise UnknownUser("the client has shown no certificate")
    return of_certificate(certificate, der)
