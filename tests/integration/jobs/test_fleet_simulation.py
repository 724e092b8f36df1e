"""The simulated fleet is what a client takes it for: daemons with agents, clocks, and what is wrong with them."""

import time
from collections.abc import Iterator

import grpc
import pytest
from campaign.parts.fleet import FAR, FINE, REFUSING, UNSTEADY, Fleet, running_fleet
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import watch_to_end
from support.waiting import scaled

pytestmark = pytest.mark.slow

SECOND_NS = 10**9
HOUR_S = 3600
KINDS = (FINE, FINE, UNSTEADY, FAR, REFUSING)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(len(KINDS), broken=dict(enumerate(KINDS)), shifts_s=(0, HOUR_S)) as running:
        yield running


@pytest.fixture
def stubs(fleet: Fleet) -> Iterator[list[ProfilerStub]]:
    channels = [grpc.insecure_channel(host.address) for host in fleet.hosts]
    yield [ProfilerStub(channel) for channel in channels]
    for channel in channels:
        channel.close()


def ahead_ns(stub: ProfilerStub) -> tuple[int, int]:
    """By how much the clock is ahead of ours at least and at most: the longer the answer takes, the less is known."""
    before_ns = time.time_ns()
    clock = stub.GetClock(pb.GetClockRequest(), timeout=scaled(10))
    return clock.sent_ns - time.time_ns(), clock.received_ns - before_ns


def test_its_hosts_record_the_same_window_by_their_own_clocks(fleet: Fleet, stubs: list[ProfilerStub]) -> None:
    spec = pb.CaptureSpec(duration_ns=SECOND_NS // 20, warmup_ns=SECOND_NS // 2, arm_ns=300 * SECOND_NS)
    armed = [stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10)).id for stub in stubs[:2]]
    begin_ns = time.time_ns() + round(scaled(3) * SECOND_NS)
    for host, stub, capture_id in zip(fleet.hosts, stubs, armed, strict=False):
        own_ns = begin_ns + host.shift_s * SECOND_NS
        stub.StartCapture(pb.StartCaptureRequest(id=capture_id, start_time_ns=own_ns), timeout=scaled(10))
    for host, stub, capture_id in zip(fleet.hosts, stubs, armed, strict=False):
        ended = watch_to_end(stub, capture_id)
        assert (ended.status, ended.host) == (pb.CAPTURE_STATUS_DONE, host.name)
        assert {target.process.rank for target in ended.targets} == set(host.ranks)
        shift_ns = host.shift_s * SECOND_NS
        assert {target.summary.window_start_ns - shift_ns for target in ended.targets} == {begin_ns}


def test_its_clocks_are_as_right_as_they_should_be(stubs: list[ProfilerStub]) -> None:
    for stub, right_ns in ((stubs[0], 0), (stubs[1], HOUR_S * SECOND_NS), (stubs[3], (24 + 1) * HOUR_S * SECOND_NS)):
        least_ns, most_ns = ahead_ns(stub)
        assert least_ns <= right_ns <= most_ns
    for _ in range(2):  # a second ahead and a second behind in turn
        (first_least_ns, first_most_ns), (least_ns, most_ns) = ahead_ns(stubs[2]), ahead_ns(stubs[2])
        assert first_least_ns - most_ns <= 2 * SECOND_NS <= first_most_ns - least_ns


def test_a_host_without_a_daemon_cannot_be_reached(stubs: list[ProfilerStub]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stubs[4].GetHost(pb.GetHostRequest(), timeout=scaled(20))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_its_processes_train(stubs: list[ProfilerStub]) -> None:
    spec = pb.CaptureSpec(iterations=pb.IterationWindow(count=2))
    created = stubs[0].CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    ended = watch_to_end(stubs[0], created.id)
    assert [(target.verdict, target.summary.iterations) for target in ended.targets] == [(pb.VERDICT_DONE, 2)] * 2
    assert len({target.summary.first_iteration for target in ended.targets}) == 1
