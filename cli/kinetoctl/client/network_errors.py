"""What gRPC says about an address where no daemon answers, as a sentence with the cause and the remedy."""

import re
from typing import NamedTuple

from kineto_protos import endpoints

CA, CERTIFICATE, KEY = endpoints.TLS_VARIABLES
_START = "start kinetod there, or check host and port"


class _Problem(NamedTuple):
    """A pattern in gRPC's text, what it means, and what to do."""

    pattern: str
    meaning: str
    remedy: str


# In this order: a text can have several. "Socket closed" comes last, since it has many causes.
_PROBLEMS = (
    _Problem(
        r"resolving|DNS resolution|Domain name not found|name or service not known",
        "no host is known by this name",
        "check the name",
    ),
    _Problem(r"Connection refused", "nothing listens there (connection refused)", _START),
    _Problem(r"No route to host|unreachable", "there is no way to this host", "check the network and the name"),
    _Problem(
        r"Hostname Verification",
        "the server's certificate is for another name",
        "use the name that is in the certificate",
    ),
    _Problem(
        r"CERTIFICATE_VERIFY_FAILED",
        f"the server's certificate is not signed by an authority in {CA}",
        f"set {CA} to the file with the authority that signed it",
    ),
    _Problem(
        r"WRONG_VERSION_NUMBER|PACKET_LENGTH_TOO_LONG",
        "the server does not speak TLS, but certificates are configured here",
        f"unset {CA}, {CERTIFICATE} and {KEY}, or name the port of kinetod that has TLS",
    ),
    _Problem(
        r"http1\.x server|Failed parsing HTTP/2",
        "another server than kinetod answers there",
        "check the port",
    ),
    _Problem(r"timed? ?out|Timeout|Deadline", "it does not answer", "check the host, the port and firewalls"),
)
_CLOSED = r"Socket closed|Connection reset|Broken pipe|EOF|GOAWAY"


def explanation(details: str, *, tls: bool) -> str:
    """gRPC's text in plain words. tls: whether certificates were used. A text that is not known stays as it is."""
    for problem in _PROBLEMS:
        if re.search(problem.pattern, details, re.IGNORECASE):
            return f"{problem.meaning}; {problem.remedy}"
    if re.search(_CLOSED, details, re.IGNORECASE):
        if tls:
            return f"it closed the connection; it may not accept the certificate in {CERTIFICATE}"
        return f"it closed the connection; if it expects TLS, set {CA}, {CERTIFICATE} and {KEY} to PEM files"
    return details
