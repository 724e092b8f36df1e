"""Every role against every call and every owner, and the table in the document."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.permissions.role_policy import (
    CALLS,
    GRANTS,
    Action,
    Relation,
    Resource,
    Role,
    Via,
    listed,
    may,
    may_at_all,
    needed,
    sees_all,
)
from support.service.callers import caller

DOCUMENT = (Path(__file__).parents[4] / "docs/access.md").read_text()
ME, OTHER = 1000, 2000
THINGS = {
    "mine": Resource(uid=ME),
    "mine, not plain": Resource(uid=ME, plain=False),
    "another's": Resource(uid=OTHER),
    "another's in my job": Resource(uid=OTHER, job="77"),
    "another's in my job, not plain": Resource(uid=OTHER, job="77", plain=False),
    "root's in my job": Resource(uid=0, job="77"),
    "in another job": Resource(uid=OTHER, job="78"),
    "in my pod": Resource(uid=OTHER, pod="uid-1"),
    "root's in my pod": Resource(uid=0, pod="uid-1"),
    "in my pod, not plain": Resource(uid=OTHER, pod="uid-1", plain=False),
    "in another pod": Resource(uid=OTHER, pod="uid-2"),
    "nobody's": Resource(uid=None),
}
EVERYTHING = set(THINGS)
MINE = {"mine", "mine, not plain"}
MY_PODS = {"in my pod", "root's in my pod"}
MY_JOBS = {"another's in my job", "another's in my job, not plain"}
# What each role alone may do, written out.
ALLOWED: dict[tuple[Role, Action], set[str]] = {
    **{(role, Action.SEE_HOST): EVERYTHING for role in Role},
    **{(Role.ADMIN, action): EVERYTHING for action in Action},
    **{(Role.VIEWER, action): EVERYTHING for action in (Action.SEE_PROCESS, Action.SEE_CAPTURE)},
    (Role.OWN, Action.SEE_PROCESS): MINE,
    (Role.OWN, Action.TRACE): {"mine"},
    (Role.OWN, Action.SAMPLE_COUNTERS): {"mine"},
    (Role.JOBS, Action.SAMPLE_COUNTERS): {"another's in my job"},
    (Role.PODS, Action.SAMPLE_COUNTERS): MY_PODS,
    (Role.OWN, Action.SEE_CAPTURE): MINE,
    (Role.OWN, Action.CHANGE_CAPTURE): MINE,
    (Role.JOBS, Action.SEE_PROCESS): MY_JOBS,
    (Role.JOBS, Action.TRACE): {"another's in my job"},
    (Role.PODS, Action.SEE_PROCESS): {*MY_PODS, "in my pod, not plain"},
    (Role.PODS, Action.TRACE): MY_PODS,
    (Role.PODS, Action.SEE_CAPTURE): MINE,
    (Role.PODS, Action.CHANGE_CAPTURE): MINE,
    (Role.JOBS, Action.SEE_CAPTURE): MINE,
    (Role.JOBS, Action.CHANGE_CAPTURE): MINE,
}


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("roles", [set(some) for size in range(6) for some in itertools.combinations(Role, size)])
def test_roles_may_do_what_each_of_them_may_do_and_nothing_else(roles: set[Role], action: Action) -> None:
    who = caller(ME, roles, jobs=frozenset({"77"}), pods=frozenset({"uid-1"}))
    allowed = {name for name, resource in THINGS.items() if may(who, action, resource)}
    assert allowed == set().union(*(ALLOWED.get((role, action), set()) for role in roles))
    assert may_at_all(who, action) == any((role, action) in ALLOWED for role in roles)
    assert sees_all(who, action) == (allowed == EVERYTHING)


@pytest.mark.parametrize("action", list(Action))
def test_a_certificate_without_a_user_owns_nothing(action: Action) -> None:
    who = caller(None, {Role.OWN, Role.JOBS})
    assert not any(may(who, action, resource) for resource in THINGS.values()) or action is Action.SEE_HOST


def test_a_job_that_is_not_the_callers_gives_nothing() -> None:
    assert not may(caller(ME, {Role.JOBS}), Action.TRACE, THINGS["another's in my job"])


def test_what_is_in_no_job_and_no_pod_is_in_none_of_the_callers() -> None:
    who = replace(caller(ME, {Role.JOBS, Role.PODS}), jobs=frozenset({""}), pods=frozenset({""}))
    assert not may(who, Action.TRACE, THINGS["another's"])


def test_every_call_of_the_interface_has_a_rule() -> None:
    assert set(CALLS) == {method.name for method in pb.DESCRIPTOR.services_by_name["Profiler"].methods}


def test_every_action_names_the_roles_that_may_do_it_to_everything() -> None:
    assert needed(Action.TRACE) == "the role admin"
    assert needed(Action.SEE_CAPTURE) == "the role viewer or the role admin"


def test_the_document_has_the_same_table() -> None:
    table = DOCUMENT.split("<!-- calls")[1].split("<!-- end of calls")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))
    expected = {
        call: " | ".join(str(GRANTS[action].get(role, "no")) for role in Role) for call, action in CALLS.items()
    }
    assert rows == expected
    assert str(Relation.ANY) == "any"


def test_a_caller_is_named_by_what_it_was_known_by() -> None:
    web = caller(990, name="CN:web")
    assert str(caller()) == "user1000 (uid 1000)"
    assert str(caller(name="CN:ada")) == "user1000 (uid 1000), certificate CN:ada"
    assert str(caller(None, name="CN:robot")) == "the certificate CN:robot"
    assert str(caller(proxy=web)) == "user1000 (uid 1000) through user990 (uid 990), certificate CN:web"
    assert str(replace(caller(None), user="ada@x", via=Via.KUBERNETES)) == "the Kubernetes user ada@x"
    assert (caller().key, caller(None, name="CN:robot").key) == ("uid 1000", "certificate CN:robot")
    assert (listed({Role.OWN, Role.ADMIN}), listed(())) == ("admin, own", "none")
