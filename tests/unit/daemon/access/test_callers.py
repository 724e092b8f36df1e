import asyncio
import pwd
from dataclasses import replace
from pathlib import Path

import pytest
from kinetod.access.callers import Callers
from kinetod.access.peers import Peer
from kinetod.base.errors import NotIdentified, NotPermitted
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings
from kinetod.permissions.role_grants import GIVEN, parse_grant
from kinetod.permissions.role_policy import Action, Caller, Role, Via

ADA = 61001
NAME = "unix-abstract:kinetod-1"
CONFIG = Config(listen=(ListenAddress(path=Path("/x")),), agent_socket=Path("/y"), state_dir=Path("/z"))
STEP = "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"


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
    with pytest.raises(NotIdentified, match="does not know this connection"):
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
    for clock.now in (0.0, 59.0, 61.0):
        who(callers)
    assert asked == [ADA, ADA]


def test_the_jobs_of_a_user_are_known_where_processes_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "10"
    folder.mkdir()
    (folder / "cgroup").write_text(STEP)
    (folder / "stat").write_text("10 (x) S " + " ".join(["0"] * 18) + " 100 0\n")
    (folder / "status").write_text(f"Uid:\t{ADA}\t{ADA}\t{ADA}\t{ADA}\n")
    callers = known(CONFIG, local(), tmp_path)
    assert who(callers, action=Action.TRACE).jobs == {"77"}
    assert who(callers, action=Action.SEE_HOST).jobs == frozenset()
    assert who(known(CONFIG, local(ADA + 1), tmp_path), action=Action.TRACE).jobs == frozenset()


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


@pytest.mark.parametrize("name", [b"gone", b"mallory", b"ops\0", b"\xff", b""])
def test_other_certificates_are_unknown(name: bytes) -> None:
    callers = known(replace(CONFIG, certificates=CERTIFICATES), REMOTE)
    with pytest.raises(NotPermitted) as caught:
        who(callers, {"x509_common_name": [name]})
    assert caught.value.reason == "UNKNOWN_CERTIFICATE"


def test_however_often_one_user_asks_at_a_time_the_jobs_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def jobs_of(uid: int, _proc: Path) -> frozenset[str]:
        asked.append(uid)
        return frozenset({"77"})

    monkeypatch.setattr("kinetod.access.callers.jobs_of", jobs_of)

    async def run() -> set[frozenset[str]]:
        callers = known(CONFIG, local())
        found = await asyncio.gather(*(callers.caller(NAME, {}, Action.TRACE) for _ in range(50)))
        return {each.jobs for each in found}

    assert asyncio.run(run()) == {frozenset({"77"})}
    assert asked == [ADA]


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
def test_a_web_front_end_must_name_one_user_who_exists(auth: dict[str, list[bytes]]) -> None:
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
    other = {"x509_common_name": [b"ops"], **for_user("daemon")}
    assert isinstance(who(known(PAGES, REMOTE), other).refusal, NotPermitted)


def test_calls_through_a_web_front_end_count_for_their_user_alone() -> None:
    callers = known(PAGES, local(WEB))

    def key(auth: dict[str, list[bytes]]) -> str:
        asyncio.run(callers.introduce(NAME, auth))
        return callers.standing(NAME, auth).key

    assert key(for_user("daemon")) == f"uid {pwd.getpwnam('daemon').pw_uid}"
    assert key(for_certificate("CN:ops")) == "certificate CN:ops"
    assert key(for_user("no-such-user")) == key({}) == f"uid {WEB}"
    assert known(PAGES, local(ADA)).standing(NAME, for_user("daemon")).key == f"uid {ADA}"


FAR = Peer(via=Via.DYNOLOG, address="192.0.2.7")


def test_a_client_of_dynolog_on_this_host_is_its_user() -> None:
    found = who(known(CONFIG, Peer(via=Via.DYNOLOG, uid=ADA, address="127.0.0.1:5")))
    assert (found.uid, found.via) == (ADA, Via.DYNOLOG)
    assert found.roles == {Role.OWN, Role.JOBS}


def test_a_client_of_dynolog_on_another_host_is_nobody_unless_a_user_is_named() -> None:
    with pytest.raises(NotPermitted, match=r"nothing identifies a client at 192\.0\.2\.7") as caught:
        who(known(CONFIG, FAR))
    assert caught.value.reason == "NOT_IDENTIFIED"
    user = pwd.getpwuid(1)
    found = who(known(replace(CONFIG, dynolog_remote_user=user.pw_name, admin_users=(user.pw_name,)), FAR))
    assert (found.uid, found.user, found.address) == (1, user.pw_name, "192.0.2.7")
    assert found.roles == {Role.OWN, Role.JOBS, Role.ADMIN}


@pytest.mark.parametrize("user", ["root", "no-such-user"])
def test_clients_on_other_hosts_never_count_for_root(user: str) -> None:
    with pytest.raises(NotPermitted, match="which is no user of this host, or root"):
        who(known(replace(CONFIG, dynolog_remote_user=user), FAR))
