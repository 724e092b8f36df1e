"""Calls that a web front end makes for the users of its pages: how it names them, and whether it may.

Theory of operation
    The front end names the user in gRPC metadata: USER_KEY once, with the name of a user of this host, or
    CERTIFICATE_KEY for each name in the certificate that the user has shown, in the order in which they count. Only
    those in `access.web_proxies` may do that; from others it is refused, not ignored, so that a caller who meant to act
    for somebody else is not answered as itself. The user has the roles that a connection of the same user would have,
    but no more than `access.web_proxy_roles`, and is never root or the daemon's own user.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kineto_protos.call_values import CERTIFICATE_KEY, CERTIFICATE_NAME, MAX_NAMES, USER_KEY, USER_NAME

from kinetod.base.errors import NotPermitted, Reason
from kinetod.base.safe_text import clean
from kinetod.permissions.role_policy import Caller, Via

KEYS = (USER_KEY, CERTIFICATE_KEY)
_USER_NAME, _CERTIFICATE_NAME = re.compile(USER_NAME), re.compile(CERTIFICATE_NAME)
_DOORS = (Via.UNIX, Via.TLS)  # listeners that identify the front end, not only the user of the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Behalf:
    """The user a call is made for: a user of this host, or the one whom these certificate names stand for."""

    user: str = ""
    certificates: tuple[str, ...] = ()

    @property
    def audited(self) -> dict[str, Any]:
        """The facts for the audit log."""
        return {"asked_user": self.user, "asked_certificate": ", ".join(self.certificates)}


def is_asked(auth: Mapping[str, Iterable[bytes]]) -> bool:
    """Whether a call claims to be made for somebody else."""
    return any(True for key in KEYS for _ in auth.get(key, ()))


def behalf(auth: Mapping[str, Iterable[bytes]]) -> Behalf | None:
    """The user that the call claims to act for. None if that is inconsistent: two users, or an invalid name."""
    users, names = (tuple(value.decode("ascii", "replace") for value in auth.get(key, ())) for key in KEYS)
    if len(users) == 1 and not names and _USER_NAME.fullmatch(users[0]):
        return Behalf(user=users[0])
    if names and not users and len(names) <= MAX_NAMES and all(map(_CERTIFICATE_NAME.fullmatch, names)):
        return Behalf(certificates=names)
    return None


def is_web_proxy(via: Via, name: str, web_proxies: Iterable[str]) -> bool:
    """Whether a caller of this name, a user's or a certificate's, may speak for others."""
    return via in _DOORS and name in web_proxies


def refused(caller: Caller, asked: Behalf | None, why: str) -> NotPermitted:
    """The refusal of a call for somebody else."""
    error = NotPermitted(Reason.NOT_DELEGATED, f"{caller} may not call for {_shown(asked)}: {why}")
    error.audited = asked.audited if asked is not None else {}
    return error


def _shown(asked: Behalf | None) -> str:
    if asked is None:
        return "somebody else"
    return asked.user or f"the certificate {clean(', '.join(asked.certificates), 300)}"
