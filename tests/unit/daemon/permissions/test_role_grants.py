import pytest
from kinetod.permissions.role_grants import (
    GIVEN,
    Grant,
    LocalRules,
    certificate_names,
    local_roles,
    parse_grant,
    parse_role,
    wrong_names,
)
from kinetod.permissions.role_policy import Role
from support.peers.certificates import Authority

RULES = LocalRules(
    everybody=frozenset({Role.OWN}),
    admin_users=frozenset({"ada"}),
    admin_groups=frozenset({"ops"}),
    viewer_users=frozenset({"bob"}),
    viewer_groups=frozenset({"staff", "gone"}),
)
GIDS = {"ops": 50, "staff": 60, "gone": None}


@pytest.mark.parametrize(
    ("uid", "user", "gids", "roles"),
    [
        (0, "root", set(), set(GIVEN)),
        (7, "kineto", set(), set(GIVEN)),
        (1000, "carol", {100}, {Role.OWN}),
        (1000, "ada", {100}, {Role.OWN, Role.ADMIN}),
        (1000, "carol", {50}, {Role.OWN, Role.ADMIN}),
        (1000, "bob", {100}, {Role.OWN, Role.VIEWER}),
        (1000, "carol", {60, 50}, {Role.OWN, Role.VIEWER, Role.ADMIN}),
    ],
)
def test_users_have_the_roles_of_all_the_daemons_own_and_of_their_groups(
    uid: int, user: str, gids: set[int], roles: set[Role]
) -> None:
    found = local_roles(RULES, uid=uid, user=user, gids=frozenset(gids), own_uid=7, gid_of=GIDS.get)
    assert found == roles


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("own, jobs as ada", Grant(roles=frozenset({Role.OWN, Role.JOBS}), user="ada")),
        ("viewer", Grant(roles=frozenset({Role.VIEWER}))),
        ("admin as ops-bot", Grant(roles=frozenset({Role.ADMIN}), user="ops-bot")),
    ],
)
def test_grants_are_read_and_written(text: str, grant: Grant) -> None:
    assert parse_grant(text) == grant
    assert parse_grant(str(grant)) == grant


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no role"),
        (" as ada", "names no role"),
        ("own", 'the roles own and jobs need a user of this host; expected for example "own as ada"'),
        ("pods as ada", "'pods' is not a role; expected one of own, jobs, viewer, admin"),
        ("boss", "'boss' is not a role; expected one of own, jobs, viewer, admin"),
        ("own as a b", "'a b' is not a valid user name"),
        ("own as -x", "'-x' is not a valid user name"),
    ],
)
def test_wrong_grants_are_explained(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_grant(text)
    assert str(caught.value).startswith(problem)


def test_a_role_is_one_of_four() -> None:
    assert parse_role("jobs") is Role.JOBS


def test_names_of_certificates_have_a_kind() -> None:
    grant = parse_grant("viewer")
    names = dict.fromkeys(("URI:spiffe://a/b", "DNS:x", "CN:y", "y", "CN:", "CN", "EMAIL:a@b"), grant)
    assert list(wrong_names(names)) == ["y", "CN:", "CN", "EMAIL:a@b"]


def test_the_names_of_a_certificate_come_in_the_order_in_which_they_count() -> None:
    auth = {"x509_common_name": [b"ada"], "peer_dns": [b"one", b"two"], "peer_uri": [b"spiffe://a/b"], "other": [b"x"]}
    assert certificate_names(auth) == ["URI:spiffe://a/b", "DNS:one", "DNS:two"]


@pytest.mark.parametrize("kind", ["peer_uri", "peer_dns"])
def test_a_common_name_does_not_count_beside_another(kind: str) -> None:
    assert certificate_names({"x509_common_name": [b"ada"], kind: [b"x"]}) == [f"{kind[5:].upper()}:x"]


@pytest.mark.parametrize(
    ("names", "counts"),
    [({}, True), ({"dns": "x"}, False), ({"ip": "10.0.0.1"}, False), ({"registered_id": "1.2.3.4"}, False)],
)
def test_a_common_name_counts_only_where_there_is_no_alternative_name_of_any_kind(
    names: dict[str, str], counts: bool
) -> None:
    issued = Authority().issue("operator", **names)  # type: ignore[arg-type]
    auth = {"x509_common_name": [b"operator"], "x509_pem_cert": [issued.certificate]}
    assert certificate_names(auth) == (["CN:operator"] if counts else [])


def test_a_certificate_that_cannot_be_read_has_no_common_name() -> None:
    assert certificate_names({"x509_common_name": [b"operator"], "x509_pem_cert": [b"\xff"]}) == []
