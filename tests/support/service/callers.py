"""Callers as the daemon's parts get them."""

from collections.abc import Iterable

from kinetod.permissions.role_policy import Caller, Role, Via


def caller(uid: int | None = 1000, roles: Iterable[Role] = (Role.OWN, Role.JOBS), **more: object) -> Caller:
    """A user of this host with these roles."""
    user = "" if uid is None else f"user{uid}"
    return Caller(**{"uid": uid, "user": user, "roles": frozenset(roles), "via": Via.UNIX, **more})  # type: ignore[arg-type]


ROOT = caller(0, Role)
