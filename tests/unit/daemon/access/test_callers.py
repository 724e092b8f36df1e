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
