"""Hosts that come and go, and what a host that does not answer costs: nothing of the others."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos import endpoints
from kineto_protos.services import add_to_server
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.fleet.host_client import HostClient
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import TimedOut, Unreachable
from kinetoctl.web.shared import fleet_hosts
from kinetoctl.web.shared.fleet_hosts import (
    CALLS_OF_USER,
    LATE_S,
    LOOK_UP_S,
    FleetHosts,
    FleetUser,
    HostSource,
    hosts_of_lists,
    hosts_of_service,
)
from support.peers.certificates import Authority
from support.service.fake_profiler import FakeProfiler, serve
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
