"""Who may connect where, as the daemon is wired: sockets' modes, users whom it serves, TLS and tokens of its doors."""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.access.callers import CallerStatus
from kinetod.access.connections.connection_proxy import Listener
from kinetod.access.peers import Peer
from kinetod.attach.attach_types import Finding, Status
from kinetod.base.errors import Exhausted, Reason, StartError
from kinetod.config import settings as settings_module
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings, serves_everybody, socket_mode
from kinetod.dynolog_door.door_server import DynologServer
from kinetod.dynolog_door.log_files import LogFiles
from kinetod.permissions.role_policy import Caller, Via
from kinetod.wiring import access_wiring
from kinetod.wiring.access_wiring import STANDING_LINES, AccessParts, DynologDoor, make_access, make_dynolog_door
from support.service.callers import ROOT, caller

HELPER, OWN, ELSE = Path("/run/helper.sock"), 1000, 1001
TLS: dict[str, Any] = {name: Path(f"/{name}") for name in ("tls_certificate", "tls_key", "tls_client_ca")}
UNIX, LOOPBACK, NETWORK = (
    ListenAddress(path=Path("/s")), ListenAddress(host="127.0.0.1", port=1), ListenAddress(host="0.0.0.0", port=1),
)  # fmt: skip
EVERYBODYS = [(0, None), (OWN, HELPER), (0, HELPER)]  # the daemon's user, and its attach helper
NOBODY = CallerStatus(key="nobody", who="nobody")
LOGS = Finding("dynolog_files", Status.OK, "the writer service writes traces below /scratch")


class Files:
    """Files of clients. asked: whether the daemon serves all users, each time that somebody has asked."""

    def __init__(self, *told: Finding) -> None:
        self._told = told
        self.asked: list[bool] = []

    async def findings(self, *, everybody: bool) -> list[Finding]:
        self.asked.append(everybody)
        return list(self._told)


class Server:
    """A door that is open, or closed because of a process."""

    address = ListenAddress(host="localhost", port=1778)

    def __init__(self, problem: str = "", holder: str = "") -> None:
        self.problem, self._holder = problem, holder
        self.listening_at = [] if problem else ["127.0.0.1:1778", "[::1]:1778"]

    async def holder(self) -> str:
        return self._holder


def found(server: Any, who: Caller = ROOT, files: Files | None = None) -> list[Finding]:
    door = DynologDoor(cast("LogFiles", files or Files()), cast("DynologServer | None", server), everybody=True)
    return asyncio.run(door.findings(who))


def test_an_open_door_is_named_with_its_addresses_and_none_is_not_shown() -> None:
    (only,) = found(Server())
    assert (only.name, only.status) == ("dynolog_door", Status.OK)
    assert only.detail == "`dyno` is served at 127.0.0.1:1778, [::1]:1778"
    assert found(None) == []


def test_what_is_known_of_the_files_follows_and_without_a_door_nobody_asks() -> None:
    files = Files(LOGS)
    assert found(Server(), files=files)[1:] == [LOGS]
    assert found(None, files=files) == []
    assert files.asked == [True]


def test_who_has_the_port_is_told_to_those_who_may_see_all_processes() -> None:
    server = Server("localhost:1778 is in use by process 77 (dynolog)", "process 77 (dynolog)")
    (only,) = found(server)
    assert only.detail == "`dyno` is not served: localhost:1778 is in use by process 77 (dynolog)"
    (only,) = found(server, caller(1000))
    assert only.detail == "`dyno` is not served: localhost:1778 is in use by another process"
    (only,) = found(Server("cannot listen on localhost:1778: Permission denied"), caller(1000))
    assert only.detail == "`dyno` is not served: cannot listen on localhost:1778"


def config(folder: Path = Path("/f"), **changes: Any) -> Config:
    return Config(**{"listen": (), "agent_socket": folder / "agent.sock", "state_dir": folder / "state", **changes})


@pytest.fixture
def runs_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda uid: monkeypatch.setattr(os, "geteuid", lambda: uid)


def peer(uid: int | None) -> Peer:
    return Peer(via=Via.UNIX, uid=uid)


@pytest.mark.parametrize(("uid", "helper"), EVERYBODYS)
def test_root_and_a_front_end_with_a_helper_serve_everybody(
    runs_as: Callable[[int], None], uid: int, helper: Path | None
) -> None:
    runs_as(uid)
    assert serves_everybody(config(helper_socket=helper))
    assert socket_mode(config(helper_socket=helper)) == 0o666


def test_a_users_daemon_serves_that_user(runs_as: Callable[[int], None]) -> None:
    runs_as(OWN)
    assert not serves_everybody(config())
    assert socket_mode(config()) == 0o600


@contextlib.asynccontextmanager
async def parts(folder: Path, **changes: Any) -> AsyncIterator[tuple[AccessParts, Settings]]:
    settings = Settings(config(folder, **changes))
    async with contextlib.AsyncExitStack() as stack:
        yield await make_access(settings, stack), settings


@pytest.mark.parametrize("terminal", [True, False])
def test_in_a_terminal_the_audit_log_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(access_wiring, "in_terminal", lambda: terminal)

    async def run() -> Path:
        async with parts(tmp_path) as (_access, settings):
            return settings.current.state_dir / "audit.jsonl"

    assert asyncio.run(run()).exists() == terminal


@pytest.mark.parametrize("listener", ["grpc", "dynolog"])
@pytest.mark.parametrize(
    ("helper", "let_in"), [(HELPER, {0, OWN, ELSE, None}), (None, {0, OWN})], ids=["everybody", "own"]
)
def test_who_is_let_in_and_who_has_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: str, helper: Path | None, let_in: set[int | None]
) -> None:
    as_own = SimpleNamespace(geteuid=lambda: OWN, cpu_count=lambda: 2, environ={})
    for module in (access_wiring, access_wiring, settings_module):
        monkeypatch.setattr(module, "os", as_own)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            settings = Settings(config(tmp_path, helper_socket=helper, dynolog_rpc=UNIX))
            made = await make_access(settings, stack)
            server: Any = made.front
            admin = made.front.peer_limits._is_admin
            if listener == "dynolog":
                nothing: Any = None
                captures: Any = type("Captures", (), {"resource": None})
                store: Any = type("Store", (), {"target_dir": None})
                dynolog = make_dynolog_door(
                    settings, made, nothing, store, captures, stack, looks=nothing, healthy=lambda: True
                )
                assert dynolog.everybody is (helper is not None)
                server = dynolog.server
                admin = server._limits._is_admin
            assert server._socket_mode == (0o666 if helper else 0o600)
            known = let_in | ({None} if listener == "dynolog" else set())  # the network: its own settings open it
            assert {uid for uid in (0, OWN, ELSE, None) if server._lets_in(peer(uid))} == known
            assert {uid for uid in (0, OWN, ELSE, None) if admin(peer(uid))} == {0, OWN}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("address", "without", "tls"),
    [
        (UNIX, False, False),
        (UNIX, True, False),
        (LOOPBACK, False, True),
        (LOOPBACK, True, False),
        (NETWORK, True, True),
    ],
)
def test_tls_is_left_out_on_this_host_alone(address: ListenAddress, without: bool, tls: bool) -> None:
    (listener,) = access_wiring._doors(config(listen=(address,), loopback_without_tls=without, **TLS))
    assert listener == Listener(address=address, tls=tls)
    (listener,) = access_wiring._doors(config(listen=(address,), loopback_without_tls=without))
    assert listener == Listener(address=address, tls=False)  # the rules of the settings refuse the network without


@pytest.mark.parametrize(("address", "tls"), [(LOOPBACK, False), (NETWORK, True)])
def test_the_door_for_tokens_is_there_if_kubernetes_is_and_has_tls_on_the_network(
    address: ListenAddress, tls: bool
) -> None:
    assert access_wiring._doors(config(kubernetes=False, kubernetes_listen=address)) == []
    listeners = access_wiring._doors(config(kubernetes=True, kubernetes_listen=address))
    assert listeners == [Listener(address=address, tls=tls, tokens=True)]


@pytest.mark.parametrize("missing", TLS)
def test_certificates_are_read_if_all_are_named(missing: str) -> None:
    files = access_wiring._tls_files(config(**TLS))
    assert files is not None
    assert (files.certificate, files.key, files.client_ca) == tuple(TLS.values())
    assert access_wiring._tls_files(config(**{**TLS, missing: None})) is None


def test_a_reload_opens_the_audit_log_anew_and_the_end_closes_it(tmp_path: Path) -> None:
    log = tmp_path / "audit"

    async def run() -> None:
        async with parts(tmp_path, audit_file=log) as (made, settings):
            log.rename(tmp_path / "audit.1")
            settings.replace(settings.current)
            made.audit.write("GetHost", "allowed", None)

    asyncio.run(run())
    assert "GetHost" in log.read_text()  # all had been written when it ended


def test_certificates_that_are_not_there_keep_the_daemon_from_starting(tmp_path: Path) -> None:
    async def run() -> None:
        async with parts(tmp_path, **TLS):
            pass

    with pytest.raises(StartError, match="TLS cannot be set up"):
        asyncio.run(run())


@pytest.mark.parametrize(("given", "is_there"), [("/other:{}", True), ("/other", False), (None, False)])
def test_the_audit_log_has_a_file_in_the_folder_that_systemd_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, is_there: bool
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    if given is not None:
        monkeypatch.setenv("STATE_DIRECTORY", given.format(state))

    async def run() -> None:
        async with parts(tmp_path):
            pass

    asyncio.run(run())
    assert (state / "audit.jsonl").exists() is is_there


def test_what_calls_of_ours_did_to_a_program_is_in_the_audit_log(tmp_path: Path) -> None:
    key, identity = SimpleNamespace(pid=7), SimpleNamespace(uid=1001)
    agent: Any = SimpleNamespace(key=key, identity=identity)
    standing = pb.StandingCall(capture_id="c1", call="cuptiFinalize", since_ns=5)

    async def run() -> None:
        async with parts(tmp_path, audit_file=tmp_path / "audit") as (made, _settings):
            made.tell_standing(agent, standing, "stands")

    asyncio.run(run())
    line = json.loads((tmp_path / "audit").read_text())
    assert line.pop("time_ns") > 0
    assert line == {
        "call": "(standing call)",
        "decision": "stands",
        "capture": "c1",
        "target_pid": 7,
        "target_uid": 1001,
        "vendor_call": "cuptiFinalize",
        "since_ns": 5,
    }


def test_a_process_that_says_it_all_the_time_is_few_lines_of_the_audit_log(tmp_path: Path) -> None:
    agents: list[Any] = [
        SimpleNamespace(key=SimpleNamespace(pid=uid), identity=SimpleNamespace(uid=uid)) for uid in (7, 8)
    ]

    async def run() -> None:
        async with parts(tmp_path, audit_file=tmp_path / "audit") as (made, _settings):
            for _ in range(1000):
                for how in ("stands", "returned"):
                    made.tell_standing(agents[0], pb.StandingCall(call="cuptiFinalize", since_ns=5), how)
            made.tell_standing(agents[1], pb.StandingCall(call="cuptiFinalize", since_ns=5), "stands")

    asyncio.run(run())
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert sum(line.get("count", 1) for line in lines) == 2001
    assert len(lines) <= 2 * (STANDING_LINES + 1) + 1
    assert {line["target_uid"] for line in lines} == {7, 8}


def test_the_end_closes_the_sockets_and_writes_what_was_counted(tmp_path: Path) -> None:
    path = tmp_path / "kinetod.sock"
    before = threading.active_count()

    async def run() -> None:
        async with parts(tmp_path, listen=(ListenAddress(path=path),), audit_file=tmp_path / "audit") as (made, _):
            await made.front.start()
            assert path.is_socket()
            for _ in range(3):
                made.call_tracker.unknown("GetHost", "a connection", {})
                made.call_tracker.flooded(
                    "GetHost", "a connection", NOBODY, Exhausted(Reason.TOO_MANY_CALLS, "too many")
                )

    asyncio.run(run())
    assert not path.exists()
    assert threading.active_count() == before  # that of the audit log has ended, too
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [line.get("count") for line in lines] == [None, 2]
