"""Traces with hardware counters when kinetod-counters or the daemon is killed, and by a process's own libkineto."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace import open_trace
from support.counters.fake_pm_sampling import UUID
from support.counters.sampled_host import SampledHost, sampled_host
from support.losses import without_losses
from support.peers.on_demand_kineto import (
    BASE_NS,
    OnDemandKineto,
    event,
    on_demand_kineto,
    polls_in,
    trace_text,
)
from support.service.daemon import watch_to_end
from support.waiting import scaled, until

ENDED = "the daemon ended before the sampling did (killed, crashed or stopped); later samples are missing"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SampledHost]:
    with sampled_host(tmp_path) as started:
        yield started


def samples(host: SampledHost, capture: pb.Capture, pid: int) -> int:
    """Rows of hardware counters in the trace, without those of power and clocks."""
    read = open_trace(host.folder(capture.id, pid))
    known = [number for number, text in enumerate(read.strings) if text in ("DRAM", "GPU busy", "SM busy")]
    return int(np.isin(read.table("counter")["name"], known).sum())


def test_a_killed_kinetod_counters_leaves_its_samples_and_the_trace_goes_on(host: SampledHost, tmp_path: Path) -> None:
    host.sampling.play(f"busy={tmp_path / 'held'}")
    program = host.train(0)
    capture = host.create(program.pid)
    host.until_sampled(capture)
    os.kill(host.sampler_pid(), signal.SIGKILL)
    until(lambda: not _is_alive(host), "kinetod-counters is gone")
    ended = host.cancel(capture, keep=True)
    (target,), (sampled,) = ended.targets, ended.counters
    assert target.reason_code == "CANCELLED" and target.summary.activities["kernel"] > 0
    assert sampled.reason_code == "COUNTERS_FAILED" and "kinetod-counters has ended" in sampled.reason
    (warning,) = (each for each in without_losses(target.warnings) if each.startswith("hardware counters"))
    assert warning.startswith("hardware counters of GPU 0: kinetod-counters has ended")
    assert samples(host, capture, program.pid) > 3 * 50
    again = host.create(program.pid, duration_ns=200_000_000)
    assert watch_to_end(host.daemon.stub(), again.id).counters[0].reason_code == ""


def _is_alive(host: SampledHost) -> bool:
    try:
        return bool(host.sampler_pid())
    except ValueError:
        return False


def test_a_trace_beside_a_kinetod_counters_that_hangs_says_so_and_the_next_one_is_as_usual(host: SampledHost) -> None:
    program = host.train(0)
    assert watch_to_end(host.daemon.stub(), host.create(program.pid, duration_ns=200_000_000).id).counters[0].samples
    sampler = host.sampler_pid()
    os.kill(sampler, signal.SIGSTOP)
    try:
        ended = watch_to_end(host.daemon.stub(), host.create(program.pid, duration_ns=10**9).id)
    finally:
        os.kill(sampler, signal.SIGCONT)
    (target,), (sampled,) = ended.targets, ended.counters
    assert (target.verdict, target.summary.activities["kernel"] > 0) == (pb.VERDICT_DONE, True)
    assert (sampled.reason_code, sampled.samples) == ("COUNTERS_FAILED", 0)
    assert sampled.reason == "kinetod-counters did not respond before the recording ended"
    assert "sampling had not begun when the recording ended" in without_losses(target.warnings)[0]
    again = watch_to_end(host.daemon.stub(), host.create(program.pid, duration_ns=200_000_000).id)
    assert again.counters[0].reason_code == "" and samples(host, again, program.pid)


def test_what_a_killed_daemon_has_sampled_is_in_the_recovered_trace(host: SampledHost) -> None:
    program = host.train(1)
    capture = host.create(program.pid)
    host.until_sampled(capture)
    host.until_power_is_read(capture)
    host.daemon.kill()
    host.daemon.start()
    ended = watch_to_end(host.daemon.stub(), capture.id)
    (target,), (sampled,) = ended.targets, ended.counters
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "DAEMON_RESTARTED")
    told = [f"{what} of GPU 1: {ENDED}" for what in ("hardware counters", "power and clocks")]
    # with the daemon a buffer of calls may be lost, or the end of one
    lost = ("have no launch", "the end of the data is missing because the daemon ended")
    assert [each for each in without_losses(target.warnings) if not any(text in each for text in lost)] == told
    assert (sampled.gpu.index, sampled.gpu.uuid, sampled.reason_code) == (1, UUID.format(1), "COUNTERS_FAILED")
    assert (sampled.reason, len(sampled.metrics), sampled.samples > 400) == (ENDED, 8, True)
    assert samples(host, capture, program.pid) > 3 * 50
    stored = host.daemon.stub().GetCapture(pb.GetCaptureRequest(id=capture.id), timeout=scaled(30))
    assert list(stored.counters) == [sampled]


def test_a_daemon_that_is_stopped_stores_the_counters(host: SampledHost) -> None:
    program = host.train(0)
    capture = host.create(program.pid)
    host.until_sampled(capture)
    assert host.daemon.stop() == 0
    host.daemon.start()
    ended = watch_to_end(host.daemon.stub(), capture.id)
    assert ended.targets[0].reason_code in ("DAEMON_STOPPED", "DAEMON_RESTARTED")  # as fast as the machine is
    assert len(ended.counters) == 1 and samples(host, capture, program.pid) > 100


def kernels(request: object, begin_ns: int, end_ns: int, devices: tuple[int, ...] = (0,)) -> str:
    """A file of libkineto's with a kernel at the beginning and at the end of this time on each device."""
    times = [(begin_ns - BASE_NS) / 1000, (end_ns - BASE_NS) / 1000 - 10]
    rows = [
        event(
            "gemm", begin_us, 10.0, cat="kernel", pid=device, tid=7,
            args={"device": device, "context": 1, "stream": 7, "correlation": 1, "External id": 1},
        )
        for device in devices
        for begin_us in times
    ]  # fmt: skip
    return trace_text(request, rows)


def recorded(host: SampledHost, kineto: OnDemandKineto, devices: tuple[int, ...]) -> tuple[pb.Capture, pb.Target]:
    """A trace of this process by its own libkineto, in whose window there is half a second of samples."""
    capture = host.create(os.getpid(), recorder=pb.RECORDER_KINETO, duration_ns=10**9)
    request = kineto.take()
    kineto.is_busy()
    begin_ns = time.time_ns()
    host.until_grown(capture.id, os.getpid())
    kineto.write(kernels(request["REQUEST_TRACE_ID"], begin_ns, time.time_ns(), devices))
    ended = watch_to_end(host.daemon.stub(), capture.id)
    return ended, ended.targets[0]


def test_a_trace_by_libkineto_has_the_counters_of_the_only_gpu_and_others_are_not_guessed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dynolog-") as name:
        Path(name).chmod(0o1777)
        settings = polls_in(name)
        with sampled_host(tmp_path, **settings) as host, on_demand_kineto(Path(name)) as kineto:
            host.is_on(os.getpid(), 1)
            capture, target = recorded(host, kineto, (0,))
            assert (target.verdict, target.recorder) == (pb.VERDICT_DONE, pb.RECORDER_KINETO)
            assert not [text for text in target.warnings if "are left out" in text]
            assert samples(host, capture, os.getpid()) > 3 * 100
            assert set(open_trace(host.folder(capture.id, os.getpid())).table("counter")["device"].tolist()) == {0}
            assert target.summary.activities.keys() == {"kernel"}
            host.is_on(os.getpid(), 0)
            capture, target = recorded(host, kineto, (0, 1))
            assert target.verdict == pb.VERDICT_DONE
            assert sum("does not show which of them this is" in text for text in target.warnings) == 2
            assert samples(host, capture, os.getpid()) == 0
