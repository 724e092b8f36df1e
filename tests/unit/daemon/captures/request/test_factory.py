"""Whose captures are whose."""

import os

import pytest
from kinetod.captures.request.factory import NOBODY, OwnersKey, owner_of, whose_are_listed
from kinetod.permissions.role_policy import Role
from support.service.callers import caller


@pytest.mark.parametrize(
    ("uid", "roles", "owner", "listed"),
    [
        (1000, {Role.OWN}, 1000, 1000),
        (0, {Role.JOBS}, 0, 0),
        (1000, {Role.OWN, Role.VIEWER}, 1000, None),
        (None, {Role.ADMIN}, os.geteuid(), None),
        (None, {Role.PODS}, os.geteuid(), NOBODY),  # not those of the daemon's user
    ],
)
def test_a_caller_owns_and_lists_captures_by_uid(
    uid: int | None, roles: set[Role], owner: int, listed: int | None
) -> None:
    who = caller(uid, roles)
    assert (owner_of(who), whose_are_listed(who)) == (owner, listed)


def test_two_owners_may_use_the_same_key() -> None:
    assert [OwnersKey("k", 1).stored, OwnersKey("k", 2).stored, OwnersKey("", 1).stored] == ["1:k", "2:k", ""]
