"""Traces with hardware counters by users who share a host: real daemon of root, agents of two users, fake GPUs."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace import open_trace
from support.counters.sampled_host import LONG_NS, SampledHost, sampled_host
from support.losses import without_losses
from support.service.calls_as import Answer, CallsAs, plain_python
from support.service.daemon import watch_to_end
from support.waiting import until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")

ADA, BOB, OLGA, VERA = 61001, 61002, 61003, 61004
SHORT_NS = 300_000_000
SETTINGS = f"""
[access]
viewer_users = ["{VERA}"]
admin_users = ["{OLGA}"]
"""
SINCE = "; samples since its processes were last checked are left out"
MORE_THAN_A_LOOK_BYTES = 9000 * 48  # a look every 5 s, a row of 48 bytes every ms


@dataclass(frozen=True)
class Shared:
    """Ada trains on GPU 0. An operator is an administrator, a viewer is none."""

    host: SampledHost
    adas: int
    ada: CallsAs
    bob: CallsAs
    operator: CallsAs
    viewer: CallsAs
    root: CallsAs

    def create(self, who: CallsAs, pid: int, duration_ns: int = SHORT_NS) -> Answer:
        spec = pb.CaptureSpec(
            selector=pb.Selector(pids=[pid]), duration_ns=duration_ns, counters=pb.CounterRequest(), no_attach=True
        )
        return who.call(self.host.daemon.address, "CreateCapture", pb.CreateCaptureRequest(spec=spec))

    def traced(self, who: CallsAs, pid: int) -> pb.Capture:
        """The capture of this process by this user, which has ended."""
        return watch_to_end(self.host.daemon.stub(), self.create(who, pid).only.id)

    def watched(self, who: CallsAs, *gpus: int) -> Answer:
        request = pb.WatchCountersRequest(gpus=gpus, period_ns=100_000_000)
        return who.call(self.host.daemon.address, "WatchCounters", request, most=1)

    def samples(self, capture: pb.Capture) -> int:
        """Rows of counters, power and clocks in the trace of the only target. Hardware counters are of GPU 0."""
        read = open_trace(self.host.folder(capture.id, capture.targets[0].pid))
        rows = read.table("counter")
        if "GPU busy" in read.strings:
            busy = rows["value"][rows["name"] == read.strings.index("GPU busy")]
            assert (busy // 1000 == 0).all()
        return len(rows)

    @contextmanager
    def bobs(self, *gpus: int) -> Iterator[int]:
        """A process of Bob's with a context on these GPUs."""
        with subprocess.Popen([*plain_python(BOB), "-c", "input()"], stdin=subprocess.PIPE) as process:
            self.host.is_on(process.pid, *gpus)
            try:
                yield process.pid
            finally:
                self.host.leave(process.pid, *gpus)
                process.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    config = folder / "config.toml"
    config.write_text(SETTINGS)
    with ExitStack() as stack:
        host = stack.enter_context(sampled_host(folder, "--config", str(config)))
        host.daemon.root.chmod(0o755)
        users = [stack.enter_context(CallsAs(uid)) for uid in (ADA, BOB, OLGA, VERA, 0)]
        yield Shared(host, host.train(0, uid=ADA).pid, *users)


def codes(capture: pb.Capture) -> dict[int, str]:
    assert capture.status == pb.CAPTURE_STATUS_DONE, capture
    return {each.gpu.index: each.reason_code for each in capture.counters}


def told(capture: pb.Capture) -> list[str]:
    """The warnings of counters, without those of samples that a busy machine loses."""
    return [each for each in without_losses(capture.targets[0].warnings) if each.startswith("hardware counters")]


def test_users_on_gpus_of_their_own_have_the_counters_of_those(shared: Shared) -> None:
    with shared.bobs(1):
        capture = shared.traced(shared.ada, shared.adas)
        assert (codes(capture), told(capture), capture.owner_uid) == ({0: ""}, [], ADA)
        assert shared.samples(capture) > 200
        (gpu,) = shared.watched(shared.ada).only.gpus
        assert gpu.gpu == 0
        (gpu,) = shared.watched(shared.bob).only.gpus
        assert gpu.gpu == 1
        refused = shared.watched(shared.ada, 1)
        assert (refused.code, refused.reason) == ("PERMISSION_DENIED", "NOT_YOUR_GPU")


def test_nobody_traces_a_process_of_somebody_else_for_its_counters(shared: Shared) -> None:
    begun = shared.host.sampling.calls().count("cuptiPmSamplingStart")
    for who in (shared.bob, shared.viewer):
        assert shared.create(who, shared.adas).reason == "NOT_YOUR_PROCESS"
        assert shared.watched(who, 0).reason == "NOT_YOUR_GPU"
    assert shared.host.sampling.calls().count("cuptiPmSamplingStart") == begun


def test_of_a_shared_gpu_a_user_has_the_trace_alone_and_administrators_have_the_counters(shared: Shared) -> None:
    with shared.bobs(0, 1):
        begun = shared.host.sampling.calls().count("cuptiPmSamplingStart")
        capture = shared.traced(shared.ada, shared.adas)
        assert codes(capture) == {0: "COUNTERS_NOT_PERMITTED"}
        assert capture.targets[0].summary.activities["kernel"] > 0
        (warning,) = told(capture)
        assert warning.startswith("hardware counters of GPU 0: none were sampled: ")
        assert "its counters cover all processes on it" in warning
        assert shared.samples(capture) == 0
        for who in (shared.ada, shared.bob):
            assert shared.watched(who, 0).reason == "NOT_YOUR_GPU"
        assert shared.host.sampling.calls().count("cuptiPmSamplingStart") == begun
        for who in (shared.root, shared.operator):
            capture = shared.traced(who, shared.adas)
            assert (codes(capture), told(capture)) == ({0: ""}, [])
            assert shared.samples(capture) > 200
            assert [gpu.gpu for gpu in shared.watched(who).only.gpus] == [0, 1]


def test_a_gpu_in_mig_mode_has_no_counters_for_anybody_and_a_shared_one_says_first_who_may_not(shared: Shared) -> None:
    shared.host.say("mig 0")
    shared.host.sampling.play("mig=1")
    try:
        alone = shared.traced(shared.ada, shared.adas)
        with shared.bobs(0):
            together, by_root = shared.traced(shared.ada, shared.adas), shared.traced(shared.root, shared.adas)
    finally:
        shared.host.sampling.play()
        shared.host.unsay("mig 0")
    assert (codes(alone), codes(together)) == ({0: "COUNTERS_UNAVAILABLE"}, {0: "COUNTERS_NOT_PERMITTED"})
    assert codes(by_root) == {0: "COUNTERS_UNAVAILABLE"}
    assert shared.samples(together) == 0


def ended_beside_bob(shared: Shared, capture: pb.Capture) -> tuple[pb.Capture, int]:
    """The capture, cancelled when Bob has been there for a while, and when he came, in Unix time."""
    came_ns = time.time_ns()
    with shared.bobs(0):
        until(lambda: time.time_ns() > came_ns + SHORT_NS, "there are samples beside him")
        capture = shared.host.cancel(capture, keep=True)
    assert capture.status == pb.CAPTURE_STATUS_PARTIAL
    return capture, came_ns


def ends_ns(shared: Shared, capture: pb.Capture) -> npt.NDArray[np.int64]:
    """When each row of counters, power and clocks in the trace ends."""
    rows = open_trace(shared.host.folder(capture.id, shared.adas)).table("counter")
    found: npt.NDArray[np.int64] = rows["start"] + rows["duration"]
    return found


def test_a_process_that_comes_in_a_short_capture_is_not_in_its_samples(shared: Shared) -> None:
    capture = shared.create(shared.ada, shared.adas, LONG_NS).only
    shared.host.until_sampled(capture)
    capture, came_ns = ended_beside_bob(shared, capture)
    assert [each.reason_code for each in capture.counters] == ["COUNTERS_NOT_PERMITTED"]
    (warning,) = told(capture)
    assert warning.endswith(SINCE) and not (ends_ns(shared, capture) > came_ns).any()
    assert any(each.startswith("power and clocks of GPU 0: ") for each in capture.targets[0].warnings)


def test_the_samples_up_to_the_last_look_before_a_process_came_are_kept(shared: Shared) -> None:
    capture = shared.create(shared.ada, shared.adas, LONG_NS).only
    shared.host.until_sampled(capture)
    (path,) = shared.host.counter_files(capture.id, shared.adas)
    until(lambda: path.stat().st_size > MORE_THAN_A_LOOK_BYTES, "it was looked at again", state=shared.host.daemon.log)
    capture, came_ns = ended_beside_bob(shared, capture)
    assert [each.reason_code for each in capture.counters] == ["COUNTERS_NOT_PERMITTED"]
    kept_ns = ends_ns(shared, capture)
    assert len(kept_ns) > 1000 and kept_ns.max() <= came_ns


def test_an_administrator_keeps_the_samples_when_others_come(shared: Shared) -> None:
    capture = shared.create(shared.operator, shared.adas, LONG_NS).only
    shared.host.until_sampled(capture)
    capture, came_ns = ended_beside_bob(shared, capture)
    assert ([each.reason_code for each in capture.counters], told(capture)) == ([""], [])
    assert (ends_ns(shared, capture) > came_ns).sum() > 200
