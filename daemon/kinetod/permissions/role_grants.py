"""Maps users and certificates to roles according to the configuration. Pure.

A certificate is identified by one of its names: `URI:spiffe://cluster/ada` or `DNS:login1.cluster` of the subject's
alternative names, in this order. The first one found in `access.certificates` counts. `CN:ada`, of the subject itself,
counts only in a certificate without any alternative name (RFC 6125): many authorities vouch only for alternative names,
and the requester of a certificate chooses the subject.
"""

import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kineto_protos.call_values import USER_NAME

from kinetod.permissions.role_policy import Role

_PROPERTIES = {"URI": "peer_uri", "DNS": "peer_dns", "CN": "x509_common_name"}  # in gRPC's auth context
_PEM = "x509_pem_cert"
_ALTERNATIVES_OID = b"\x06\x03\x55\x1d\x11"  # subjectAltName, 2.5.29.17, in DER; gRPC knows four of its kinds
NAME_KINDS = tuple(_PROPERTIES)
GIVEN = tuple(role for role in Role if role is not Role.PODS)  # that one comes with a Kubernetes token
_USER = re.compile(USER_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The roles and user of a certificate; user is empty if it maps to none of this host."""

    roles: frozenset[Role]
    user: str = ""

    def __str__(self) -> str:
        roles = ", ".join(sorted(self.roles))
        return f"{roles} as {self.user}" if self.user else roles


def parse_grant(text: str) -> Grant:
    """Parses a grant such as `own, jobs as ada`, `viewer` or `admin`. Raises ValueError."""
    roles, separator, user = text.partition(" as ")
    user = user.strip()
    if separator and not _USER.fullmatch(user):
        raise ValueError(f'{user!r:.80} is not a valid user name; expected for example "own, jobs as ada"')
    found = frozenset(map(parse_role, filter(None, re.split(r"[\s,]+", roles))))
    if not found:
        raise ValueError('names no role; expected for example "own, jobs as ada"')
    if not user and found & {Role.OWN, Role.JOBS}:
        raise ValueError(
            f'the roles own and jobs need a user of this host; expected for example "{roles.strip()} as ada"'
        )
    return Grant(roles=found, user=user)


def parse_role(text: str) -> Role:
    """Parses a role that can be granted. Raises ValueError."""
    if text not in GIVEN:
        raise ValueError(f"{text!r:.80} is not a role; expected one of {', '.join(GIVEN)}")
    return Role(text)


def wrong_names(certificates: Iterable[str]) -> Iterable[str]:
    """The configured names that no certificate can have."""
    for name in certificates:
        kind, _, rest = name.partition(":")
        if kind not in NAME_KINDS or not rest:
            yield name


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRules:
    """The settings about users of this host."""

    everybody: frozenset[Role]
    admin_users: frozenset[str]
    admin_groups: frozenset[str]
    viewer_users: frozenset[str]
    viewer_groups: frozenset[str]

    @property
    def groups(self) -> frozenset[str]:
        """All groups that give a role."""
        return self.admin_groups | self.viewer_groups


def local_roles(
    rules: LocalRules,
    *,
    uid: int,
    user: str,
    gids: frozenset[int],
    own_uid: int,
    gid_of: Callable[[str], int | None],
) -> frozenset[Role]:
    """The roles of a user of this host. root and the daemon's own user are administrators."""
    if uid in (0, own_uid):
        return frozenset(GIVEN)

    def named(users: frozenset[str], groups: frozenset[str]) -> bool:
        return user in users or any(gid_of(group) in gids for group in groups)

    roles = set(rules.everybody)
    if named(rules.admin_users, rules.admin_groups):
        roles.add(Role.ADMIN)
    if named(rules.viewer_users, rules.viewer_groups):
        roles.add(Role.VIEWER)
    return frozenset(roles)


def certificate_names(auth: Mapping[str, Iterable[bytes]]) -> list[str]:
    """The names in gRPC's auth context as the configuration writes them, in the order in which they count."""
    found = {
        kind: [value.decode("utf-8", "replace") for value in auth.get(name, ())] for kind, name in _PROPERTIES.items()
    }
    if found["URI"] or found["DNS"] or any(map(_has_alternatives, auth.get(_PEM, ()))):
        del found["CN"]
    return [f"{kind}:{value}" for kind, values in found.items() for value in values]


def _has_alternatives(pem: bytes) -> bool:
    """Whether a certificate has alternative names, of whatever kind; also if it cannot be read."""
    try:
        return _ALTERNATIVES_OID in ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    except ValueError:
        return True
