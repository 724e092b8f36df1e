"""What one user is shown of many hosts: which are asked, what is said of those that do not answer, and commands."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL
from kinetoctl.client.fleet.broadcast import HostAnswer
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import CliError, Denied, NotFound, Unreachable
from kinetoctl.web.shared import fleet_hosts
from kinetoctl.web.shared.fleet_hosts import FleetDaemons, FleetUser, HostSource

FOR_ADA = (("kineto-for-user", "ada"),)
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
    with pytest.raises(Unreachable, match=r"no host that answers .*: b: no daemon at b:1$"):
        daemons.parts(missing)
    for host in hosts.hosts.values():
        host.error = Denied("nobody knows you")
    with pytest.raises(Denied, match="no host shows you"):
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
