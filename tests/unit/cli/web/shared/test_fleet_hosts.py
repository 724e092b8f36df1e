"""Hosts that come and go, and what a host that does not answer costs: nothing of the others."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos import endpoints
from kineto_protos.services import add_to_server
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL
from kinetoctl.client.fleet.host_client import HostAnswer, HostClient
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import CliError, Denied, NotFound, TimedOut, Unreachable
from kinetoctl.output.stack_page import StackLook
from kinetoctl.web.shared import fleet_hosts
from kinetoctl.web.shared.fleet_hosts import (
    CALLS_OF_USER,
    LATE_S,
    LOOK_UP_S,
    FleetDaemons,
    FleetHosts,
    FleetUser,
    HostSource,
    hosts_of_lists,
    hosts_of_service,
)
from support.peers.certificates import Authority
from support.service.fake_profiler import WAIT_FOR_CANCEL, Abort, FakeProfiler, FakeServer, serve
from support.service.stacks import hanging
from support.waiting import scaled, until

FOR_ADA = (("kineto-for-user", "ada"),)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages wait for names until they are there, unless a test says otherwise."""
    monkeypatch.setattr(fleet_hosts, "WAIT_S", scaled(10))


@contextmanager
def fleet(source: HostSource, clock: Callable[[], float] = time.monotonic) -> Iterator[FleetHosts]:
    hosts = FleetHosts(source, clock)
    try:
        yield hosts
    finally:
        hosts.close()


async def who(client: HostClient, _place: Place) -> str:
    return (await client.host()).hostname


def names(hosts: FleetHosts) -> list[str]:
    return [place.host for place in hosts.places()]


def test_a_host_that_is_added_to_the_file_is_there_soon_and_one_that_is_removed_is_not(tmp_path: Path) -> None:
    file, clock = tmp_path / "hosts", Clock()
    file.write_text("gpu-1\n")
    with fleet(hosts_of_lists([str(file)]), clock) as hosts:
        assert names(hosts) == ["gpu-1"]
        file.write_text("gpu-2\ngpu-3:99\n")
        assert names(hosts) == ["gpu-1"]
        clock.now = LOOK_UP_S
        assert [(place.host, place.address) for place in hosts.places()] == [
            ("gpu-2", "gpu-2:50051"),
            ("gpu-3:99", "gpu-3:99"),
        ]


def test_hosts_that_cannot_be_looked_up_stay_as_they_were_and_that_is_told(tmp_path: Path) -> None:
    file, clock = tmp_path / "hosts", Clock()
    file.write_text("gpu-1\n")
    with fleet(hosts_of_lists([f"@{file}"]), clock) as hosts:
        assert (names(hosts), hosts.problem) == (["gpu-1"], "")
        file.unlink()
        clock.now = LOOK_UP_S
        assert names(hosts) == ["gpu-1"]
        assert f"cannot be looked up: cannot read {file}" in hosts.problem


def test_a_service_that_nobody_knows_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    why = r"kinetod\.kineto\.svc:50051 cannot be looked up.*not known"
    with fleet(hosts_of_service("kinetod.kineto.svc", 50051)) as hosts, pytest.raises(Unreachable, match=why):
        hosts.places()


def test_a_name_that_is_not_resolved_yet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = threading.Event()

    def slow() -> list[Place]:
        assert resolved.wait(scaled(30))
        return [Place("gpu-1", "gpu-1:50051")]

    monkeypatch.setattr(fleet_hosts, "WAIT_S", 0.05)
    with fleet(HostSource(find=slow, name="slow")) as hosts:
        with pytest.raises(Unreachable, match="slow are being looked up"):
            hosts.places()
        resolved.set()
        monkeypatch.setattr(fleet_hosts, "WAIT_S", scaled(10))
        assert names(hosts) == ["gpu-1"]


def test_each_address_of_a_service_is_a_host_with_the_name_that_it_gives_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(2, 1, 6, "", ("10.0.0.2", 7)), (2, 1, 6, "", ("10.0.0.1", 7)), (10, 1, 6, "", ("fd00::1", 7, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert [place.address for place in hosts_of_service("kinetod.kineto.svc", 7).find()] == [
        "10.0.0.1:7",
        "10.0.0.2:7",
        "[fd00::1]:7",
    ]
    with serve(FakeProfiler(host=pb.Host(hostname="gpu-1"))) as server:
        source = HostSource(find=lambda: [Place("10.0.0.1", server.address)], name="service", named=False)
        with fleet(source) as hosts:
            (answer,) = hosts.ask(hosts.places(), who, user=FleetUser(FOR_ADA), timeout_s=scaled(10))
            assert answer.place.host == "gpu-1"
            assert names(hosts) == ["gpu-1"]
            hosts.ask(hosts.places(), who, user=FleetUser(FOR_ADA), timeout_s=scaled(10))
            assert len(server.profiler.requests) == 3  # its name is asked for once


def test_a_host_that_says_nothing_is_told_of_in_time_and_the_others_have_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serve(FakeProfiler(host=pb.Host(hostname="x"))) as server:
        places = [
            Place("silent", f"127.0.0.1:{silent.getsockname()[1]}"),
            Place("there", server.address),
            Place("gone", "unix:/nowhere/kinetod.sock"),
        ]
        with fleet(HostSource(find=lambda: places, name="three")) as hosts:
            began = time.monotonic()
            late, there, gone = hosts.ask(hosts.places(), who, user=FleetUser(FOR_ADA), timeout_s=scaled(2))
            assert time.monotonic() - began < scaled(10)
    assert isinstance(late.error, Unreachable) and "not answer" in str(late.error)
    assert there.value == "x"
    assert "no daemon at unix:/nowhere" in str(gone.error)


def test_a_host_that_was_late_is_not_waited_for_by_the_next_pages() -> None:
    clock, asked = Clock(), 0

    async def question(_client: HostClient, _place: Place) -> str:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.0 if asked > 1 else scaled(60))
        return "here"

    ada, bea = FleetUser(FOR_ADA), FleetUser((("kineto-for-user", "bea"),))
    places = [Place("slow", "127.0.0.1:1")]
    with fleet(HostSource(find=lambda: places, name="one"), clock) as hosts:
        while not asked:  # the time may be over before the question is asked
            clock.now += LATE_S
            (answer,) = hosts.ask(places, question, user=ada, timeout_s=0.05)
            assert isinstance(answer.error, TimedOut)
        (answer,) = hosts.ask(places, question, user=ada, timeout_s=0.05)
        assert isinstance(answer.error, TimedOut) and asked == 1
        assert (
            hosts.ask(places, question, user=bea)[0].value == "here"
        )  # whoever made it late hides it from nobody else
        assert hosts.ask(places, question, user=ada, retry_s=1.0)[0].value == "here"  # a capture is made
        clock.now += LATE_S
        assert hosts.ask(places, question, user=ada)[0].value == "here"


def test_many_hosts_are_asked_so_many_at_a_time_of_one_user() -> None:
    places = [Place(f"h{number}", f"127.0.0.1:{number + 1}") for number in range(300)]
    now, most = 0, 0

    async def question(_client: HostClient, _place: Place) -> bool:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return True

    with fleet(HostSource(find=lambda: places, name="many")) as hosts, ThreadPoolExecutor(4) as pool:
        ada = FleetUser(FOR_ADA)
        asked = [pool.submit(hosts.ask, places, question, user=ada, timeout_s=scaled(30)) for _ in range(4)]
        answers = [answer for each in asked for answer in each.result()]
    assert len(answers) == 1200 and all(answer.value for answer in answers)
    assert most <= CALLS_OF_USER


def looks(places: Sequence[Place], address: str | None = None) -> StackLook:
    """Where every rank of these hosts stands."""
    with fleet(HostSource(find=lambda: list(places), name="hosts")) as hosts:
        return FleetDaemons(hosts, FOR_ADA, 30.0).stacks(pb.Selector(ranks=[-1]), address)


@pytest.fixture
def two() -> Iterator[list[FakeServer]]:
    """Two hosts with half of a job each."""
    found = hanging()
    with serve(FakeProfiler(stacks=[found[:4]])) as one, serve(FakeProfiler(stacks=[found[4:]])) as other:
        yield [one, other]


def at(servers: Sequence[FakeServer]) -> list[Place]:
    return [Place(f"gpu-{number}", each.address) for number, each in enumerate(servers, 1)]


def test_stacks_of_all_hosts_are_one_look_and_hosts_without_a_match_are_not_named(two: list[FakeServer]) -> None:
    no_match = Abort(grpc.StatusCode.NOT_FOUND, "no process matches", "NO_MATCH")
    with serve(FakeProfiler(stacks=[[no_match]])) as third:
        look = looks([*at([*two, third]), Place("gone", "unix:/nowhere/kinetod.sock")])
    assert sorted((each.rank, each.host) for each in look.processes) == [
        *((rank, "gpu-1") for rank in range(4)),
        *((rank, "gpu-2") for rank in range(4, 8)),
    ]
    ((host, error),) = look.failures
    assert (host, list(look.empty)) == ("gone", []) and "no daemon at unix:/nowhere" in error


def test_a_look_at_one_host_asks_no_other(two: list[FakeServer]) -> None:
    assert {each.host for each in looks(at(two), address=two[1].address).processes} == {"gpu-2"}
    assert two[0].profiler.requests == []
    with pytest.raises(NotFound, match=r"do not show a host at '169\.254\.169\.254:80'"):
        looks(at(two), address="169.254.169.254:80")


def test_what_a_late_host_said_before_is_part_of_the_look(
    two: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_hosts, "LOOK_S", scaled(2))
    two[1].profiler.stacks = [[*two[1].profiler.stacks[0][:1], WAIT_FOR_CANCEL]]
    look = looks(at(two))
    assert len(look.processes) == 5
    ((host, error),) = look.failures
    assert host == "gpu-2" and "did not answer within" in error


def test_all_hosts_together_send_no_more_stacks_than_a_look_takes(
    two: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_hosts, "MAX_STACK_BYTES", 3 * hanging()[0].ByteSize() + 10)
    look = looks(at(two))
    assert len(look.processes) == 3
    assert {error for _, error in look.failures} == {"the answer is too large to read at once: select fewer processes"}


def test_the_command_of_a_process_names_its_host(daemons: FleetDaemons) -> None:
    assert daemons.command("stacks", "7", address="b:1") == "kinetoctl stacks --address b:1 7"
    assert daemons.command("stacks", "--job-id", "4242") == "kinetoctl stacks --job-id 4242 --hosts @hosts"


def test_users_share_a_connection_and_a_host_that_has_gone_loses_it() -> None:
    clock = Clock()
    with serve(FakeProfiler()) as server:
        found = [Place("gpu-1", server.address)]
        with fleet(HostSource(find=lambda: list(found), name="list"), clock) as hosts:
            for user in ("ada", "bea"):
                hosts.ask(hosts.places(), who, user=FleetUser((("kineto-for-user", user),)), timeout_s=scaled(10))
            assert list(hosts._connections) == [server.address]
            found[:] = [Place("gpu-2", "unix:/nowhere/kinetod.sock")]
            clock.now = LOOK_UP_S
            hosts.places()
            until(lambda: not hosts._connections, "the connection is closed")


# ---------------------------------------------------------------- certificates


class Named:
    """Answers with the user for whom it is asked."""

    def GetHost(self, _request: pb.GetHostRequest, context: Any) -> pb.Host:
        asked = dict(context.invocation_metadata())
        return pb.Host(hostname=str(asked.get("kineto-for-user", "")))


@contextmanager
def secured(authority: Authority, dns: str) -> Iterator[int]:
    """A daemon with a certificate for this name, at a port of 127.0.0.1."""
    pair = authority.issue(dns=dns)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        add_to_server(Named(), server)
        credentials = grpc.ssl_server_credentials(
            [(pair.key, pair.certificate)], authority.certificate, require_client_auth=True
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield port
        server.stop(None).wait()


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Signs the certificates of both ends; that of the client is where the variables say."""
    found = Authority()
    pair = found.issue(dns="kinetod-web.kineto.svc")
    for name, pem in zip(endpoints.TLS_VARIABLES, (found.certificate, pair.certificate, pair.key), strict=True):
        (tmp_path / name).write_bytes(pem)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv(endpoints.TLS_NAME_VARIABLE, raising=False)
    return found


def test_the_daemons_of_a_service_have_certificates_for_its_name(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = [(2, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    for dns, answered in (("kinetod.kineto.svc", "ada"), ("other.kineto.svc", None)):
        with secured(authority, dns) as port, fleet(hosts_of_service("kinetod.kineto.svc", port)) as hosts:
            (answer,) = hosts.ask(hosts.places(), who, user=FleetUser(FOR_ADA), timeout_s=scaled(10))
            assert answer.value == answered, (dns, answer.error)


def test_certificates_are_read_again_when_their_files_have_changed(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoints.TLS_NAME_VARIABLE, "gpu-1")
    with secured(authority, "gpu-1") as port, fleet(hosts_of_lists([f"127.0.0.1:{port},"])) as hosts:
        assert hosts.ask(hosts.places(), who, user=FleetUser(FOR_ADA), timeout_s=scaled(10))[0].value == "ada"
        (before,) = hosts._connections.values()
        os.utime(tmp_path / endpoints.TLS_VARIABLES[1], (1, 1))
        assert hosts.ask(hosts.places(), who, user=FleetUser(FOR_ADA), timeout_s=scaled(10))[0].value == "ada"
        assert list(hosts._connections.values()) != [before]


FLEET, OWN = "20260101-000000-abcdef", "20260101-000001-000-aaaaaa"


@dataclass
class Host:
    """A daemon: its captures, or why it does not answer."""

    captures_kept: list[pb.Capture] = field(default_factory=list)
    error: CliError | None = None
    asked: int = 0

    async def captures(self, labels: Mapping[str, str], *, limit: int) -> list[pb.Capture]:
        self._answers()
        return [each for each in self.captures_kept if labels.items() <= dict(each.spec.labels).items()][:limit]

    async def capture(self, capture_id: str) -> pb.Capture:
        self._answers()
        found = next((each for each in self.captures_kept if each.id == capture_id), None)
        if found is None:
            raise NotFound(f"no capture {capture_id}")
        return found

    async def create(self, spec: pb.CaptureSpec, key: str) -> pb.Capture:
        self._answers()
        assert key
        return pb.Capture(id=OWN, spec=spec)

    def _answers(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


@dataclass
class Hosts:
    """Stands for FleetHosts."""

    hosts: dict[str, Host]
    source: HostSource
    problem: str = ""

    @property
    def known(self) -> tuple[Place, ...]:
        return tuple(Place(name, f"{name}:1") for name in self.hosts)

    def places(self) -> tuple[Place, ...]:
        return self.known

    def ask(self, places: Any, question: Any, *, user: FleetUser, **_limits: Any) -> list[HostAnswer[Any]]:
        assert user.metadata == FOR_ADA
        return [self._one(place, question) for place in places]

    def _one(self, place: Place, question: Any) -> HostAnswer[Any]:
        try:
            return HostAnswer(place, asyncio.run(question(self.hosts[place.host], place)), None)
        except CliError as exc:
            return HostAnswer(place, None, exc)


def kept(capture_id: str, *, fleet: str = "", status: pb.CaptureStatus = pb.CAPTURE_STATUS_DONE) -> pb.Capture:
    found = pb.Capture(id=capture_id, status=status)
    if fleet:
        found.spec.labels[FLEET_LABEL] = fleet
    return found


@pytest.fixture
def hosts() -> Hosts:
    """Of three hosts two have a part of a capture, and one of these a capture of its own."""
    return Hosts(
        {
            "a": Host([kept("20260101-000000-000-aaaaaa", fleet=FLEET), kept(OWN)]),
            "b": Host([kept("20260101-000000-000-bbbbbb", fleet=FLEET)]),
            "c": Host(),
        },
        HostSource(find=list, name="hosts", words=("--hosts", "@hosts")),
    )


@pytest.fixture
def daemons(hosts: Hosts) -> Iterator[FleetDaemons]:
    yield FleetDaemons(hosts, FOR_ADA, 30.0)  # type: ignore[arg-type]


def asked(hosts: Hosts) -> str:
    """The hosts that were asked since the last time."""
    found = "".join(name for name, host in hosts.hosts.items() if host.asked)
    for host in hosts.hosts.values():
        host.asked = 0
    return found


def test_once_a_capture_has_ended_only_the_hosts_that_have_it_are_asked(hosts: Hosts, daemons: FleetDaemons) -> None:
    assert [each.place.host for each in daemons.parts(FLEET).items] == ["a", "b"]
    assert asked(hosts) == "abc"
    daemons.parts(FLEET)
    assert asked(hosts) == "ab"
    daemons.parts(OWN)
    asked(hosts)
    daemons.parts(OWN)
    assert asked(hosts) == "a"


def test_while_a_part_runs_others_may_still_come(hosts: Hosts, daemons: FleetDaemons) -> None:
    hosts.hosts["b"].captures_kept[0].status = pb.CAPTURE_STATUS_RUNNING
    daemons.parts(FLEET)
    asked(hosts)
    daemons.parts(FLEET)
    assert asked(hosts) == "abc"


def test_while_a_host_is_silent_it_may_have_a_part(hosts: Hosts, daemons: FleetDaemons) -> None:
    hosts.hosts["c"].error = Unreachable("no daemon")
    found = daemons.parts(FLEET)
    assert [tuple(each) for each in found.unanswered] == [("c", "no daemon")]
    assert [*daemons.unanswered(FLEET)] == found.unanswered
    hosts.hosts["c"].error = None
    hosts.hosts["c"].captures_kept.append(kept("20260101-000000-000-cccccc", fleet=FLEET))
    assert [each.place.host for each in daemons.parts(FLEET).items] == ["a", "b", "c"]
    assert not daemons.unanswered(FLEET)


def test_a_host_that_has_a_part_is_not_forgotten_while_it_is_silent(hosts: Hosts, daemons: FleetDaemons) -> None:
    daemons.parts(FLEET)
    hosts.hosts["b"].error = Unreachable("no daemon")
    for _ in range(2):
        asked(hosts)
        assert [each.host for each in daemons.parts(FLEET).unanswered] == ["b"]
        assert asked(hosts) == "ab"
    hosts.hosts["b"].error = None
    assert len(daemons.parts(FLEET).items) == 2


def test_when_a_host_that_has_a_part_is_gone_all_are_asked(hosts: Hosts, daemons: FleetDaemons) -> None:
    daemons.parts(FLEET)
    hosts.hosts["d"] = hosts.hosts.pop("b")
    asked(hosts)
    assert [each.place.host for each in daemons.parts(FLEET).items] == ["a", "d"]
    assert asked(hosts) == "acd"


def test_where_nobody_has_a_capture_it_says_whether_all_have_answered(hosts: Hosts, daemons: FleetDaemons) -> None:
    missing = "20260101-000005-000-ffffff"
    with pytest.raises(NotFound, match=f"no host has a capture {missing}"):
        daemons.parts(missing)
    hosts.hosts["b"].error = Unreachable("no daemon at b:1")
    with pytest.raises(Unreachable, match=r"none of the responding hosts .*: b: no daemon at b:1$"):
        daemons.parts(missing)
    for host in hosts.hosts.values():
        host.error = Denied("nobody knows you")
    with pytest.raises(Denied, match=r"you are not allowed to see capture .* on any host"):
        daemons.parts(missing)


@pytest.mark.parametrize("name", ["x", "../x", "20260101"])
def test_what_is_no_id_is_not_asked_for(hosts: Hosts, daemons: FleetDaemons, name: str) -> None:
    with pytest.raises(NotFound):
        daemons.parts(name)
    assert asked(hosts) == ""


def test_of_many_hosts_each_is_asked_for_fewer_captures_and_that_is_told(
    hosts: Hosts, daemons: FleetDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_hosts, "LISTED", 6)
    monkeypatch.setattr(fleet_hosts, "FEWEST_LISTED", 1)
    found = daemons.captures(100)
    assert (len(found.items), found.most_of_one) == (3, 2)
    monkeypatch.setattr(fleet_hosts, "LISTED", 12)
    assert daemons.captures(100).most_of_one == 0


def test_that_hosts_cannot_be_looked_up_is_told_above_the_list(hosts: Hosts, daemons: FleetDaemons) -> None:
    hosts.problem = "the file is gone"
    assert [tuple(each) for each in daemons.captures(10).unanswered] == [("hosts", "the file is gone")]


def test_a_capture_is_made_on_the_host_of_its_process(hosts: Hosts, daemons: FleetDaemons) -> None:
    assert daemons.create("b:1", pb.CaptureSpec(duration_ns=5)).spec.duration_ns == 5
    assert asked(hosts) == "b"
    hosts.hosts["b"].error = Denied("not yours")
    with pytest.raises(Denied, match="not yours"):
        daemons.create("b:1", pb.CaptureSpec())
    with pytest.raises(NotFound, match="do not show a host"):
        daemons.create("d:1", pb.CaptureSpec())


def test_the_command_below_a_page_asks_the_hosts_that_it_is_about(hosts: Hosts, daemons: FleetDaemons) -> None:
    assert daemons.command("ps", "--all") == "kinetoctl ps --all --hosts @hosts"
    daemons.parts(FLEET)
    daemons.parts(OWN)
    assert daemons.command("report", OWN) == f"kinetoctl report --address a:1 {OWN}"
    assert daemons.command("report", "--view", "ranks", FLEET) == (
        f"kinetoctl captures fetch --hosts a:1,b:1 {FLEET} && kinetoctl report --view ranks kineto-{FLEET}"
    )
    assert daemons.command("diff", OWN, FLEET) == (
        f"kinetoctl captures fetch --host a:1 {OWN} && kinetoctl captures fetch --hosts a:1,b:1 {FLEET} && "
        f"kinetoctl diff kineto-{OWN} kineto-{FLEET}"
    )


def test_the_command_for_a_service_has_its_addresses_and_the_name_in_their_certificates(hosts: Hosts) -> None:
    hosts.source = HostSource(find=list, name="s", before=("KINETO_TLS_NAME=s",), named=False)
    daemons = FleetDaemons(hosts, FOR_ADA, 30.0)  # type: ignore[arg-type]
    assert daemons.command("ps") == "KINETO_TLS_NAME=s kinetoctl ps --hosts a:1,b:1,c:1"
