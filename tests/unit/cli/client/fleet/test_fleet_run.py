"""When the hosts of a capture begin, and whether enough of them are ready."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.fleet.fleet_run import WARMUP_NS, FleetRequest, FleetRun, common_start_ns, delivery_ns, unmet
from kinetoctl.client.fleet.host_run import HostRun, Offset, RoundTrip
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import TimedOut, UsageProblem

MS = 1_000_000
NOW_NS = 1_700_000_000 * 1000 * MS


def delivered_ns(*, trip_ns: int = MS, round_ns: int = 0, armed_ns: int = 0) -> int:
    return delivery_ns(trip_ns=trip_ns, round_ns=round_ns, armed_ns=armed_ns)


def test_the_start_leaves_time_for_the_warm_up_and_for_all_requests_to_arrive() -> None:
    needed_ns = delivered_ns(trip_ns=80 * MS, round_ns=100 * MS)
    assert common_start_ns(NOW_NS, warmup_ns=WARMUP_NS, delivered_ns=needed_ns) == NOW_NS + WARMUP_NS + needed_ns
    assert needed_ns >= 250 * MS + 3 * 80 * MS + 2 * 100 * MS


def test_hosts_that_took_long_to_get_ready_get_more_time() -> None:
    quick, slow, endless = (delivered_ns(armed_ns=each) for each in (0, 4000 * MS, 600_000 * MS))
    assert (slow - quick, endless - quick) == (1000 * MS, 2000 * MS)


def test_2048_processes_on_256_hosts_begin_within_two_seconds() -> None:
    assert WARMUP_NS + delivered_ns(trip_ns=20 * MS, round_ns=300 * MS, armed_ns=1500 * MS) < 2000 * MS


def test_a_wanted_start_is_kept() -> None:
    wanted_ns = NOW_NS + 60_000 * MS
    assert common_start_ns(NOW_NS, warmup_ns=WARMUP_NS, delivered_ns=MS, wanted_ns=wanted_ns) == wanted_ns


def test_a_wanted_start_that_is_too_near_is_refused_with_the_time_that_is_needed() -> None:
    with pytest.raises(
        UsageProblem,
        match=r"^--start-at is 254 ms too soon: even with the processes ready, the hosts need another 754 ms",
    ):
        common_start_ns(NOW_NS, warmup_ns=WARMUP_NS, delivered_ns=254 * MS, wanted_ns=NOW_NS + 500 * MS)


@pytest.mark.parametrize(
    ("requirement", "begun", "whole", "missing"),
    [
        ("any", 0, 0, "no host has a process that is ready"),
        ("any", 1, 0, ""),
        ("quorum", 2, 2, "only 2 of 4 hosts are ready, but --require quorum needs more than half"),
        ("quorum", 3, 0, ""),
        ("all", 4, 3, "only 3 of 4 hosts have all their processes ready, but --require all needs every host"),
        ("all", 4, 4, ""),
    ],
)
def test_what_a_requirement_wants(requirement: str, begun: int, whole: int, missing: str) -> None:
    assert unmet(requirement, hosts=4, begun=begun, whole=whole) == missing


@pytest.mark.parametrize(("readings", "is_left_out"), [(1, False), (0, True)])
def test_a_host_is_left_out_if_its_clock_was_never_read_not_if_a_further_reading_is_late(
    readings: int, is_left_out: bool
) -> None:
    def trips() -> Iterator[RoundTrip]:
        for _ in range(readings):
            yield RoundTrip(NOW_NS, NOW_NS + 5 * MS, NOW_NS + 5 * MS, NOW_NS + MS)
        raise TimedOut("no answer within 2 s")

    async def clock() -> RoundTrip:
        return next(found)

    found, measured = trips(), dict[HostRun, Offset]()
    request = FleetRequest(id="a", places=[Place("node1", "unix:/nowhere.sock")], spec=pb.CaptureSpec())
    fleet = request.new_fleet()
    (host,) = fleet.members
    client: Any = SimpleNamespace(clock=clock)
    run = FleetRun(request, fleet, progress=client)
    run._clients[host] = client
    asyncio.run(run._measure(fleet.members, measured.__setitem__))
    assert (host.error is not None, list(measured)) == (is_left_out, [] if is_left_out else [host])
