import asyncio
import pwd
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from kineto_protos.call_values import CERTIFICATE_KEY, MAX_NAMES, USER_KEY
from kinetod.access import callers as callers_module
from kinetod.access.callers import KEEP_JOBS_S, KEEP_NAMES_S, KEYS, Behalf, Callers, behalf, is_asked, is_web_proxy
from kinetod.access.peers import Peer
from kinetod.access.token_users import KubernetesUsers
from kinetod.base.errors import NotIdentified, NotPermitted
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings
from kinetod.permissions.role_grants import GIVEN, parse_grant
from kinetod.permissions.role_policy import Action, Caller, Role, Via

NAMES = tuple(b"DNS:a%d.example" % number for number in range(MAX_NAMES + 1))
ADA = 61001
NAME = "unix-abstract:kinetod-1"
CONFIG = Config(listen=(ListenAddress(path=Path("/x")),), agent_socket=Path("/y"), state_dir=Path("/z"))
STEP = "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"


@pytest.mark.parametrize(
    ("users", "names", "found"),
    [
        ([b"ada"], [], Behalf(user="ada")),
        ([], NAMES[:2], Behalf(certificates=("DNS:a0.example", "DNS:a1.example"))),
        ([], NAMES[:MAX_NAMES], Behalf(certificates=tuple(name.decode() for name in NAMES[:MAX_NAMES]))),
        ([], NAMES, None),
        ([b"ada", b"ada"], [], None),
        ([b"ada"], NAMES[:1], None),
        ([b"ada bob"], [], None),
        ([b"\xff"], [], None),
        ([b""], [], None),
        ([], [NAMES[0], b"a\tb"], None),
        ([], [b""], None),
    ],
)
def test_a_call_is_for_one_user_or_one_certificate(
    users: list[bytes], names: list[bytes], found: Behalf | None
) -> None:
    asked = {USER_KEY: users, CERTIFICATE_KEY: names}
    assert behalf(asked) == found
    assert is_asked(asked)


def test_a_call_that_names_nobody_is_for_its_caller() -> None:
    assert not is_asked({})
    assert not is_asked({USER_KEY: (), "authorization": (b"token",)})
    assert behalf({}) is None


@pytest.mark.parametrize(
    ("via", "name", "may"),
    [
        (Via.UNIX, "web", True),
        (Via.TLS, "web", True),
        (Via.LOOPBACK, "web", False),
        (Via.KUBERNETES, "web", False),
        (Via.DYNOLOG, "web", False),
        (Via.UNIX, "ada", False),
        (Via.TLS, "", False),
    ],
)
def test_front_ends_speak_for_others_where_it_is_known_who_they_are(via: Via, name: str, may: bool) -> None:
    assert is_web_proxy(via, name, ("web",)) is may


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def known(config: Config, peer: Peer, proc: Path = Path("/nowhere"), clock: Clock | None = None) -> Callers:
    return Callers(Settings(config), {NAME: peer}.get, own_uid=7, proc=proc, clock=clock or Clock())


def who(callers: Callers, auth: dict[str, list[bytes]] | None = None, action: Action = Action.SEE_HOST) -> Caller:
    return asyncio.run(callers.caller(NAME, auth or {}, action))


def local(uid: int = ADA, *gids: int) -> Peer:
    return Peer(via=Via.UNIX, uid=uid, gids=frozenset(gids), pid=4242)


def test_a_user_is_who_the_kernel_says() -> None:
    found = who(known(CONFIG, local()))
    assert (found.uid, found.user, found.pid, found.via) == (ADA, str(ADA), 4242, Via.UNIX)
    assert found.roles == {Role.OWN, Role.JOBS}


def test_a_connection_that_nobody_made_is_not_identified() -> None:
    with pytest.raises(NotIdentified, match="cannot identify this connection"):
        asyncio.run(known(CONFIG, local()).caller("unix:", {}, None))


def test_root_and_the_daemons_own_user_are_administrators_whatever_is_configured() -> None:
    config = replace(CONFIG, local_roles=())
    assert who(known(config, local(0))).roles == who(known(config, local(7))).roles == set(GIVEN)
    with pytest.raises(NotPermitted) as caught:
        who(known(config, local()))
    assert caught.value.reason == "NO_ROLE"


def test_groups_of_the_connection_count_by_name() -> None:
    config = replace(CONFIG, admin_groups=("root", "no-such-group"))
    assert Role.ADMIN in who(known(config, local(ADA, 0))).roles
    assert Role.ADMIN not in who(known(config, local(ADA, 5))).roles


def test_a_reload_changes_roles_at_once() -> None:
    settings = Settings(CONFIG)
    callers = Callers(settings, {NAME: local(ADA, 0)}.get, own_uid=7)
    assert Role.VIEWER not in who(callers).roles
    settings.replace(replace(CONFIG, viewer_groups=("root",)))
    assert Role.VIEWER in who(callers).roles


def test_names_are_looked_up_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def getpwuid(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    clock = Clock()
    callers = known(CONFIG, local(), clock=clock)
    for clock.now in (0.0, KEEP_NAMES_S, KEEP_NAMES_S + 1):
        who(callers)
    assert asked == [ADA, ADA]


def test_names_that_were_looked_up_before_a_reload_and_came_after_it_are_looked_up_again() -> None:
    callers = known(replace(CONFIG, viewer_groups=("root",)), local(ADA, 0))
    who(callers)
    callers._names[ADA] = replace(callers._names[ADA], group_ids={})
    assert Role.VIEWER in who(callers).roles


def test_so_much_is_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "MAX_KEPT", 2)
    kept: dict[str, int] = {}
    for key in "abc":
        callers_module._keep(kept, key, 1)
        assert list(kept) == {"a": ["a"], "b": ["a", "b"], "c": ["c"]}[key]


def test_the_jobs_of_a_user_are_known_where_processes_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "10"
    folder.mkdir()
    (folder / "cgroup").write_text(STEP)
    (folder / "stat").write_text("10 (x) S " + " ".join(["0"] * 18) + " 100 0\n")
    (folder / "status").write_text(f"Uid:\t{ADA}\t{ADA}\t{ADA}\t{ADA}\n")
    assert who(known(CONFIG, local(), tmp_path), action=Action.TRACE).jobs == {"77"}
    assert who(known(CONFIG, local(ADA + 1), tmp_path), action=Action.TRACE).jobs == frozenset()


@pytest.mark.parametrize(
    ("uid", "roles", "action", "asked"),
    [
        (ADA, (Role.JOBS,), Action.SEE_PROCESS, True),
        (ADA, (Role.JOBS,), Action.TRACE, True),
        (ADA, (Role.JOBS,), Action.SAMPLE_COUNTERS, True),
        (ADA, (Role.JOBS,), Action.SEE_CAPTURE, False),
        (ADA, (Role.OWN,), Action.TRACE, False),
        (0, (), Action.TRACE, False),  # may trace all
    ],
)
def test_jobs_are_looked_up_where_they_decide(
    monkeypatch: pytest.MonkeyPatch, uid: int, roles: tuple[Role, ...], action: Action, asked: bool
) -> None:
    monkeypatch.setattr(callers_module, "jobs_of", lambda *_: frozenset({"77"}))
    found = who(known(replace(CONFIG, local_roles=roles), local(uid)), action=action)
    assert found.jobs == (frozenset({"77"}) if asked else frozenset())


REMOTE = Peer(via=Via.TLS, address="10.0.0.7")
CERTIFICATES = {
    "URI:spiffe://a/root": parse_grant("own as root"),
    "CN:ops": parse_grant("admin"),
    "CN:gone": parse_grant("own as no-such-user"),
}


def test_a_certificate_has_the_roles_of_its_first_name_and_no_others() -> None:
    callers = known(replace(CONFIG, certificates=CERTIFICATES), REMOTE)
    found = who(callers, {"x509_common_name": [b"ops"], "peer_uri": [b"spiffe://a/x", b"spiffe://a/root"]})
    assert (found.uid, found.user, found.name) == (0, "root", "URI:spiffe://a/root")
    assert found.roles == {Role.OWN}
    found = who(callers, {"x509_common_name": [b"ops"]})
    assert (found.uid, set(found.roles), str(found)) == (None, {Role.ADMIN}, "the certificate CN:ops")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"gone", "maps CN:gone to no-such-user, but this host has no such user"),
        (b"mallory", "the certificate with CN:mallory is valid, but is not mapped to any user or role"),
        (b"ops\0", "CN:ops"),
        (b"\xff", "CN:\N{REPLACEMENT CHARACTER}"),
        (b"", "CN: is valid"),
        (None, "the certificate with no name is valid"),
    ],
)
def test_other_certificates_are_unknown(name: bytes | None, text: str) -> None:
    callers = known(replace(CONFIG, certificates=CERTIFICATES), REMOTE)
    with pytest.raises(NotPermitted, match=text) as caught:
        who(callers, {"x509_common_name": [name]} if name is not None else {})
    assert caught.value.reason == "UNKNOWN_CERTIFICATE"


def test_however_often_one_user_asks_at_a_time_the_jobs_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def jobs_of(uid: int, _proc: Path) -> frozenset[str]:
        asked.append(uid)
        return frozenset({"77"})

    monkeypatch.setattr(callers_module, "jobs_of", jobs_of)
    clock = Clock()

    async def run() -> None:
        callers = known(CONFIG, local(), clock=clock)
        for clock.now, often in ((0.0, 1), (KEEP_JOBS_S, 1), (KEEP_JOBS_S + 1, 2)):
            found = await asyncio.gather(*(callers.caller(NAME, {}, Action.TRACE) for _ in range(50)))
            assert {each.jobs for each in found} == {frozenset({"77"})}
            assert asked == [ADA] * often

    asyncio.run(run())


def test_a_connection_alone_says_by_what_calls_are_counted() -> None:
    callers = known(CONFIG, local())
    assert (callers.standing(NAME, {}).key, callers.standing(NAME, {}).admin) == (f"uid {ADA}", False)
    assert known(CONFIG, local(0)).standing(NAME, {}).admin
    named = replace(CONFIG, admin_users=(str(ADA),))
    by_name = known(named, local())
    who(by_name)  # its name is known from now on
    assert by_name.standing(NAME, {}).admin
    certificates = replace(CONFIG, certificates={"CN:ops": parse_grant("admin")})
    tls = known(certificates, Peer(via=Via.TLS, address="192.0.2.7"))
    found = tls.standing(NAME, {"x509_common_name": [b"ops"]})
    assert (found.key, found.admin) == ("certificate CN:ops", True)
    assert tls.standing(NAME, {"x509_common_name": [b"nobody's"]}).key == "192.0.2.7"
    assert tls.standing("unix:", {}).key == "nobody"
    tokens = known(certificates, Peer(via=Via.KUBERNETES, address="192.0.2.7"))
    assert tokens.standing(NAME, {"x509_common_name": [b"ops"]}).key == "192.0.2.7"


NOBODY = pwd.getpwnam("nobody").pw_uid  # whoever is not mapped into a user namespace counts as this user
WEB = 61099  # a uid without a name: the front end's
PAGES = replace(
    CONFIG,
    web_proxies=(str(WEB), "DNS:web.cluster"),
    certificates={**CERTIFICATES, "URI:spiffe://a/daemon": parse_grant("viewer")},
)


def for_user(name: str) -> dict[str, list[bytes]]:
    return {"kineto-for-user": [name.encode()]}


def for_certificate(*names: str) -> dict[str, list[bytes]]:
    return {"kineto-for-certificate": [name.encode() for name in names]}


def test_a_web_front_end_is_answered_as_the_user_whom_it_names() -> None:
    found = who(known(PAGES, local(WEB)), for_user("daemon"))
    assert (found.uid, found.user) == (pwd.getpwnam("daemon").pw_uid, "daemon")
    assert found.roles == {Role.OWN, Role.JOBS}
    assert found.proxy is not None and found.proxy.uid == WEB
    assert str(found) == f"daemon (uid {found.uid}) through {WEB} (uid {WEB})"
    assert found.key == f"uid {found.uid}"


def test_a_web_front_end_that_names_nobody_is_itself() -> None:
    found = who(known(PAGES, local(WEB)))
    assert (found.uid, found.proxy) == (WEB, None)


@pytest.mark.parametrize("peer", [local(ADA), local(0), local(7), Peer(via=Via.LOOPBACK, uid=WEB)])
def test_nobody_else_calls_for_others(peer: Peer) -> None:
    found = who(known(PAGES, peer), for_user("daemon"))
    assert (found.uid, found.proxy) == (peer.uid, None)
    assert isinstance(found.refusal, NotPermitted)
    assert found.refusal.reason == "NOT_DELEGATED"
    assert found.refusal.audited["asked_user"] == "daemon"


@pytest.mark.parametrize(
    "auth",
    [
        for_user("no-such-user"),
        for_user("nobody"),
        for_user(""),
        for_user("da\nemon"),
        for_user("-daemon"),
        {"kineto-for-user": [b"daemon", b"daemon"]},
        {**for_user("daemon"), **for_certificate("CN:ops")},
        for_certificate("CN:mallory"),
        for_certificate("IP:10.0.0.1"),
        for_certificate(*["CN:ops"] * 17),
    ],
)
def test_a_web_front_end_must_name_one_user_who_exists(
    auth: dict[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers_module, "unmapped", lambda: NOBODY)
    found = who(known(PAGES, local(WEB)), auth)
    assert (found.uid, found.proxy) == (WEB, None)
    assert isinstance(found.refusal, NotPermitted)


@pytest.mark.parametrize("auth", [for_user("root"), for_certificate("URI:spiffe://a/root")])
def test_nobody_is_root_through_a_web_front_end(auth: dict[str, list[bytes]]) -> None:
    found = who(known(replace(PAGES, web_proxy_roles=tuple(GIVEN)), local(WEB)), auth)
    assert found.uid == WEB
    assert isinstance(found.refusal, NotPermitted)
    assert "root" in str(found.refusal)


def test_nor_the_daemons_own_user() -> None:
    own = pwd.getpwnam("daemon").pw_uid
    callers = Callers(Settings(PAGES), {NAME: local(WEB)}.get, own_uid=own, clock=Clock())
    assert isinstance(who(callers, for_user("daemon")).refusal, NotPermitted)


def test_an_administrator_has_that_role_through_a_web_front_end_only_where_it_is_allowed() -> None:
    config = replace(PAGES, admin_users=("daemon",), viewer_groups=("daemon",))
    assert who(known(config, local(WEB)), for_user("daemon")).roles == {Role.OWN, Role.JOBS, Role.VIEWER}
    config = replace(config, web_proxy_roles=(Role.ADMIN,))
    assert who(known(config, local(WEB)), for_user("daemon")).roles == {Role.ADMIN}


def test_whoever_has_no_role_left_is_refused() -> None:
    with pytest.raises(NotPermitted) as caught:
        who(known(PAGES, local(WEB)), for_certificate("CN:ops"))
    assert caught.value.reason == "NO_ROLE"


def test_a_certificate_that_a_user_showed_to_the_front_end_stands_for_what_it_always_does() -> None:
    found = who(known(PAGES, local(WEB)), for_certificate("URI:spiffe://a/x", "URI:spiffe://a/daemon"))
    assert (found.uid, found.name) == (None, "URI:spiffe://a/daemon")
    assert found.roles == {Role.VIEWER}
    assert found.key == "certificate URI:spiffe://a/daemon"


def test_a_front_end_on_another_host_is_known_by_its_certificate() -> None:
    web = {"peer_dns": [b"web.cluster"]}
    assert who(known(PAGES, REMOTE), {**web, **for_user("daemon")}).user == "daemon"
    with pytest.raises(NotPermitted, match="no role on this host"):
        who(known(PAGES, REMOTE), web)
    for refused in ({"x509_common_name": [b"ops"], **for_user("daemon")}, {**web, **for_user("no-such-user")}):
        assert isinstance(who(known(PAGES, REMOTE), refused).refusal, NotPermitted)


def introduced(peer: Peer, auth: dict[str, list[bytes]]) -> tuple[str, list[int | str]]:
    """By what a call is counted, and whose names were asked for."""
    callers = known(PAGES, peer)
    asyncio.run(callers.introduce(NAME, auth))
    standing = callers.standing(NAME, auth)
    assert standing.admin is (peer is REMOTE and standing.key == "certificate CN:ops")  # not through the front end
    return standing.key, list(callers._names)


DAEMON = f"uid {pwd.getpwnam('daemon').pw_uid}"


@pytest.mark.parametrize(
    ("peer", "shown", "auth", "key", "asked"),
    [
        (local(WEB), {}, for_user("daemon"), DAEMON, [WEB, "daemon"]),
        (local(WEB), {}, for_user("no-such-user"), f"uid {WEB}", [WEB, "no-such-user"]),
        (local(WEB), {}, for_certificate("CN:ops"), "certificate CN:ops", [WEB]),
        (local(WEB), {}, {"kineto-for-user": [b"ada", b"bob"]}, f"uid {WEB}", []),
        (local(WEB), {}, {}, f"uid {WEB}", []),
        (local(ADA), {}, for_user("daemon"), f"uid {ADA}", [ADA]),
        (REMOTE, {"peer_dns": [b"web.cluster"]}, for_user("daemon"), DAEMON, ["daemon"]),
        (REMOTE, {"x509_common_name": [b"ops"]}, for_user("daemon"), "certificate CN:ops", []),
        (REMOTE, {}, for_user("daemon"), REMOTE.address, []),
    ],
)
def test_calls_through_a_web_front_end_count_for_their_user_alone(
    peer: Peer, shown: dict[str, list[bytes]], auth: dict[str, list[bytes]], key: str, asked: list[int | str]
) -> None:
    assert introduced(peer, {**shown, **auth}) == (key, asked)


@pytest.mark.parametrize(("peer", "key"), [(REMOTE, REMOTE.address), (local(WEB), f"uid {WEB}")])
def test_a_call_for_a_user_who_was_not_looked_up_counts_for_the_front_end(peer: Peer, key: str) -> None:
    auth = {"peer_dns": [b"web.cluster"], **for_user("daemon")}
    assert known(PAGES, peer).standing(NAME, auth).key == key


FAR = Peer(via=Via.DYNOLOG, address="192.0.2.7")


def test_a_client_of_dynolog_on_this_host_is_its_user() -> None:
    found = who(known(CONFIG, Peer(via=Via.DYNOLOG, uid=ADA, address="127.0.0.1:5")))
    assert (found.uid, found.via) == (ADA, Via.DYNOLOG)
    assert found.roles == {Role.OWN, Role.JOBS}


def test_a_client_of_dynolog_on_another_host_is_nobody_unless_a_user_is_named() -> None:
    with pytest.raises(NotPermitted, match=r"the client at 192\.0\.2\.7 cannot be identified") as caught:
        who(known(CONFIG, FAR))
    assert caught.value.reason == "NOT_IDENTIFIED"
    user = pwd.getpwuid(1)
    found = who(known(replace(CONFIG, dynolog_remote_user=user.pw_name, admin_users=(user.pw_name,)), FAR))
    assert (found.uid, found.user, found.address) == (1, user.pw_name, "192.0.2.7")
    assert found.roles == {Role.OWN, Role.JOBS, Role.ADMIN}


@pytest.mark.parametrize("user", ["root", "no-such-user", "nobody"])
def test_clients_on_other_hosts_never_count_for_root(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "unmapped", lambda: NOBODY)
    with pytest.raises(NotPermitted, match="which is not a user of this host, or is root"):
        who(known(replace(CONFIG, dynolog_remote_user=user), FAR))


class Kubernetes:
    """Users of a cluster, by token. asked: for whose pods."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def introduce(self, _connection: str, auth: dict[str, list[bytes]]) -> str:
        return self.known(auth)

    def known(self, auth: dict[str, list[bytes]]) -> str:
        return auth["authorization"][0].decode() if "authorization" in auth else ""

    async def caller(self, _peer: Peer, auth: dict[str, list[bytes]], pods: object) -> Caller:
        self.asked.append(pods)
        return Caller(uid=9, user=self.known(auth), roles=frozenset(), via=Via.KUBERNETES)


TOKEN = {"authorization": [b"eve"]}


@pytest.mark.parametrize("via", Via)
def test_a_token_counts_at_its_own_door_alone(via: Via) -> None:
    cluster = Kubernetes()
    peer = Peer(via=via, uid=None if via in (Via.KUBERNETES, Via.TLS) else ADA, address="10.0.0.7")
    callers = Callers(Settings(CONFIG), {NAME: peer}.get, cast("KubernetesUsers", cluster), own_uid=7)
    there = via is Via.KUBERNETES
    assert asyncio.run(callers.introduce(NAME, TOKEN)) == ("eve" if there else "")
    assert asyncio.run(callers.introduce("another", TOKEN)) == ""
    assert (callers.standing(NAME, TOKEN).key == "kubernetes eve") is there
    if there:
        assert callers.standing(NAME, {}).key == "10.0.0.7"
        assert (who(callers, TOKEN).user, cluster.asked) == ("eve", [None])  # roles or not: it is a pod's
        asyncio.run(callers.caller(NAME, TOKEN, Action.TRACE, frozenset({"p"})))
        assert cluster.asked[1:] == [frozenset({"p"})]


def test_without_a_cluster_a_token_introduces_nobody() -> None:
    callers = known(CONFIG, Peer(via=Via.KUBERNETES, address="10.0.0.7"))
    assert asyncio.run(callers.introduce(NAME, TOKEN)) == ""
    assert callers.standing(NAME, TOKEN).key == "10.0.0.7"


def test_a_reload_forgets_the_names_of_users() -> None:
    settings = Settings(CONFIG)
    callers = Callers(settings, {NAME: local()}.get, own_uid=7, clock=Clock())
    who(callers)
    assert callers.standing(NAME, {}).who == f"{ADA} (uid {ADA})"
    settings.replace(CONFIG)
    assert callers.standing(NAME, {}).who == f"uid {ADA}"


@pytest.mark.parametrize(("count", "makes_sense"), [(1, True), (MAX_NAMES, True), (MAX_NAMES + 1, False)])
def test_a_front_end_names_so_many_names_of_a_certificate_and_no_more(count: int, makes_sense: bool) -> None:
    _, certificates = KEYS
    asked = behalf({certificates: [b"CN:%d" % number for number in range(count)]})
    assert (asked is not None) is makes_sense
