"""Traces with hardware counters: real daemon, agent and kinetod-counters on fakes of the driver and of CUPTI."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace import open_trace
from kineto_trace.model.trace import Trace
from support.counters.fake_pm_sampling import UUID
from support.counters.sampled_host import SampledHost, sampled_host
from support.losses import LOST, without_losses
from support.service.cli import Result, run_process
from support.service.daemon import watch_to_end
from support.waiting import scaled

TWO_PASSES = "sm__cycles_active.avg,sm__inst_executed_pipe_tensor.sum.per_second"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampledHost]:
    with sampled_host(tmp_path_factory.mktemp("host")) as started:
        yield started


@pytest.fixture
def sampling(host: SampledHost) -> Iterator[SampledHost]:
    """The host, whose fake of CUPTI is as usual again afterwards and was called as CUPTI has to be."""
    yield host
    host.end_programs()
    host.sampling.play()
    assert host.sampling.wrong() == []


def trace(host: SampledHost, folder: Path, *arguments: str, pids: tuple[int, ...]) -> Result:
    named = [argument for pid in pids for argument in ("--pid", str(pid))]
    folder.mkdir(exist_ok=True)
    return run_process(["trace", *named, "-o", "json", *arguments], host.daemon.client_environ(), folder)


def traced(host: SampledHost, folder: Path, *arguments: str, pids: tuple[int, ...]) -> Any:
    result = trace(host, folder, "--duration", "300ms", *arguments, pids=pids)
    assert result.code == 0, result.stderr
    return result.json()


def values(trace: Trace, label: str, device: int) -> npt.NDArray[np.float64]:
    rows = trace.table("counter")
    if label not in trace.strings:
        return np.empty(0)
    found: npt.NDArray[np.float64] = rows["value"][
        (rows["name"] == trace.strings.index(label)) & (rows["device"] == device)
    ]
    return found


def test_samples_of_the_whole_window_are_in_the_trace_by_device(sampling: SampledHost, tmp_path: Path) -> None:
    program = sampling.train(1)
    result = trace(sampling, tmp_path, "--counters", "--duration", "400ms", pids=(program.pid,))
    assert result.code == 0, result.stderr
    capture = result.json()
    (target,) = capture["targets"]
    assert (target["verdict"], without_losses(target["warnings"])) == ("VERDICT_DONE", [])
    (sampled,) = capture["counters"]
    assert (sampled["gpu"]["index"], sampled["gpu"]["uuid"], sampled["reason_code"]) == (1, UUID.format(1), "")
    missing_ms = sampled["lost_ns"] / 1e6 + sampled["dropped_samples"]  # of a machine that is busy: 0 otherwise
    assert sampled["samples"] > 400 - missing_ms
    read = open_trace(sampling.folder(capture["id"], program.pid))
    rows = read.table("counter")
    names = {read.strings[number] for number in np.unique(rows["name"]).tolist()}
    assert {"GPU busy", "SM busy", "Tensor pipe", "DRAM"} <= names
    assert set(rows["device"].tolist()) == {0}  # as the process sees it
    busy = rows["name"] == read.strings.index("GPU busy")
    start, end = rows["start"][busy], rows["start"][busy] + rows["duration"][busy]
    window_ms = (read.window_end_ns - read.window_start_ns) / 1e6
    assert window_ms - missing_ms - 1 <= busy.sum() <= window_ms + 2
    assert start.min() <= read.window_start_ns + missing_ms * 1e6
    assert end.max() >= read.window_end_ns - missing_ms * 1e6
    assert (rows["value"][busy] // 1000 == 1).all()  # of the host's GPU 1
    shown = run_process(["captures", "show", capture["id"]], sampling.daemon.client_environ())
    assert re.search(r"counters of GPU 1 \(NVIDIA H200\): [\d,]+ samples of GPU busy.*; lost ", shown.stdout)
    assert not (sampling.folder(capture["id"], program.pid) / "raw").exists()


def test_two_targets_of_one_gpu_have_its_samples_each_by_their_own_numbers(
    sampling: SampledHost, tmp_path: Path
) -> None:
    both, second = sampling.train(1, 0), sampling.train(1)
    capture = traced(sampling, tmp_path, "--counters=memory", pids=(both.pid, second.pid))
    assert [each["gpu"]["index"] for each in capture["counters"]] == [0, 1]
    assert [without_losses(target["warnings"]) for target in capture["targets"]] == [[], []]
    read = open_trace(sampling.folder(capture["id"], both.pid))
    assert {int(each // 1000) for each in values(read, "DRAM", 0)} == {1}
    assert {int(each // 1000) for each in values(read, "DRAM", 1)} == {0}
    other = open_trace(sampling.folder(capture["id"], second.pid))
    assert {int(each // 1000) for each in values(other, "DRAM", 0)} == {1}
    assert not len(values(other, "DRAM", 1))


def test_by_iteration_the_samples_are_those_of_the_iterations(sampling: SampledHost, tmp_path: Path) -> None:
    program = sampling.train(0)
    result = trace(
        sampling, tmp_path, "--iterations", "20", "--counters=gr__cycles_active.avg.pct_of_peak_sustained_elapsed",
        "--counter-interval", "200us", pids=(program.pid,),
    )  # fmt: skip
    capture = result.json()
    assert (result.code, without_losses(capture["targets"][0]["warnings"])) == (0, [])
    read = open_trace(sampling.folder(capture["id"], program.pid))
    most, found = (read.window_end_ns - read.window_start_ns) / 200_000 + 2, len(values(read, "GPU busy", 0))
    missing = capture["counters"][0]["lost_ns"] / 200_000 + capture["counters"][0]["dropped_samples"]
    assert most - missing - 3 <= found <= most


def test_a_busy_gpu_is_a_warning_and_the_trace_goes_on(sampling: SampledHost, tmp_path: Path) -> None:
    sampling.sampling.play("fail=cuptiPmSamplingSetConfig:26")
    program = sampling.train(0)
    capture = traced(sampling, tmp_path, "--counters", "--duration", "1s", pids=(program.pid,))
    (target,), (refused,) = capture["targets"], capture["counters"]
    assert target["verdict"] == "VERDICT_DONE" and target["summary"]["activities"]["kernel"] > 0
    assert (refused["reason_code"], refused["samples"], refused["gpu"]["index"]) == ("COUNTERS_BUSY", 0, 0)
    (warning,) = without_losses(target["warnings"])
    assert warning == f"hardware counters of GPU 0: none were sampled: {refused['reason']}"
    read = open_trace(sampling.folder(capture["id"], program.pid))
    assert not len(values(read, "GPU busy", 0)) and warning in read.notes


def test_losses_are_told(sampling: SampledHost, tmp_path: Path) -> None:
    sampling.sampling.play("gap=100")
    program = sampling.train(0)
    capture = traced(sampling, tmp_path, "--counters", pids=(program.pid,))
    assert capture["counters"][0]["gaps"] >= 1 and capture["counters"][0]["reason_code"] == ""
    told = [
        each
        for each in capture["targets"][0]["warnings"]
        if re.match(r"hardware counters of GPU 0: \S+ \S+ of samples", each)
    ]
    assert len(told) == 1 and LOST.fullmatch(told[0]) and capture["counters"][0]["lost_ns"] >= 3_000_000


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--counters=nothing"], "there is no set 'nothing'"),
        (["--counters=sm__no_such.avg"], "sm__no_such"),
        ([f"--counters={TWO_PASSES}"], "pass"),
        (["--counters", "--counter-interval", "5us"], "the interval must be between 10us and 1s"),
        (["--counters", "--counter-interval", "10us", "--duration", "60s"], "1,000,000 samples"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_begins(
    sampling: SampledHost, tmp_path: Path, arguments: list[str], why: str
) -> None:
    before = sampling.daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(30)).captures
    begun = sampling.sampling.calls().count("cuptiPmSamplingEnable")
    result = trace(sampling, tmp_path, *arguments, pids=(1,))
    assert result.code == 2 and why in result.stderr and "--counter" in result.stderr
    after = sampling.daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(30)).captures
    assert len(after) == len(before) and sampling.sampling.calls().count("cuptiPmSamplingEnable") == begun


def test_an_armed_capture_samples_when_it_is_started_and_not_before(sampling: SampledHost) -> None:
    program = sampling.train(0)
    begun = sampling.sampling.calls().count("cuptiPmSamplingStart")
    capture = sampling.create(program.pid, arm_ns=60 * 10**9, duration_ns=300_000_000)
    assert sampling.sampling.calls().count("cuptiPmSamplingStart") == begun
    sampling.daemon.stub().StartCapture(pb.StartCaptureRequest(id=capture.id), timeout=scaled(30))
    ended = watch_to_end(sampling.daemon.stub(), capture.id)
    assert (ended.status, without_losses(ended.targets[0].warnings)) == (pb.CAPTURE_STATUS_DONE, [])
    assert len(values(open_trace(sampling.folder(capture.id, program.pid)), "GPU busy", 0))


def test_an_armed_capture_that_is_cancelled_samples_nothing(sampling: SampledHost) -> None:
    program = sampling.train(0)
    begun = sampling.sampling.calls().count("cuptiPmSamplingEnable")
    ended = sampling.cancel(sampling.create(program.pid, arm_ns=60 * 10**9), keep=False)
    assert (ended.status, list(ended.counters)) == (pb.CAPTURE_STATUS_CANCELLED, [])
    assert sampling.sampling.calls().count("cuptiPmSamplingEnable") == begun


def test_a_cancelled_capture_frees_the_counters_and_leaves_no_file(sampling: SampledHost, tmp_path: Path) -> None:
    sampling.sampling.play(f"busy={tmp_path / 'held'}")
    program = sampling.train(0)
    capture = sampling.create(program.pid)
    sampling.until_sampled(capture)
    (path,) = sampling.counter_files(capture.id, program.pid)
    ended = sampling.cancel(capture, keep=False)
    assert ended.status == pb.CAPTURE_STATUS_CANCELLED and not path.exists()
    assert (ended.counters[0].reason_code, ended.counters[0].samples > 400) == ("", True)
    again = traced(sampling, tmp_path, "--counters", pids=(program.pid,))
    assert again["counters"][0]["reason_code"] == ""


def test_what_a_cancelled_capture_keeps_has_its_counters(sampling: SampledHost) -> None:
    program = sampling.train(0)
    capture = sampling.create(program.pid)
    sampling.until_sampled(capture)
    ended = sampling.cancel(capture, keep=True)
    assert (ended.status, without_losses(ended.targets[0].warnings)) == (pb.CAPTURE_STATUS_PARTIAL, [])
    assert len(values(open_trace(sampling.folder(capture.id, program.pid)), "DRAM", 0)) > 100


def test_a_target_that_dies_has_the_counters_until_then(sampling: SampledHost) -> None:
    dies, lives = sampling.train(0), sampling.train(0)
    capture = sampling.create(dies.pid, lives.pid)
    sampling.until_sampled(capture)
    dies.kill()
    dies.wait()
    ended = sampling.cancel(capture, keep=True)
    reasons = {target.pid: target.reason_code for target in ended.targets}
    told = [target.reason for target in ended.targets]
    assert reasons == {dies.pid: "TARGET_EXITED", lives.pid: "CANCELLED"}, told
    for pid in reasons:
        assert len(values(open_trace(sampling.folder(capture.id, pid)), "DRAM", 0)) > 50


def test_a_process_without_a_gpu_and_one_on_a_mig_instance_are_told(sampling: SampledHost, tmp_path: Path) -> None:
    none, mig = sampling.train(), sampling.train(1, FAKE_CUDA_MIG="1")
    capture = traced(sampling, tmp_path, "--counters", pids=(none.pid, mig.pid))
    warnings = {target["pid"]: target["warnings"] for target in capture["targets"]}
    what = f"according to the driver, process {none.pid} has no context on any GPU"
    assert without_losses(warnings[none.pid]) == [f"hardware counters: none were sampled; {what}"]
    assert without_losses(warnings[mig.pid]) == [
        f"hardware counters of GPU 1 ({UUID.format(1)}) are left out: the process uses a MIG instance, which has no "
        "counters of its own"
    ]


def test_without_uuids_the_only_gpu_of_a_process_is_known_and_several_are_not_guessed(
    sampling: SampledHost, tmp_path: Path
) -> None:
    one, two = sampling.train(1, FAKE_CUDA_UUID="none"), sampling.train(0, 1, FAKE_CUDA_UUID="none")
    capture = traced(sampling, tmp_path, "--counters", pids=(one.pid, two.pid))
    known = open_trace(sampling.folder(capture["id"], one.pid))
    assert {int(each // 1000) for each in values(known, "DRAM", 0)} == {1}
    assert not len(values(open_trace(sampling.folder(capture["id"], two.pid)), "DRAM", 0))
    warnings = next(target["warnings"] for target in capture["targets"] if target["pid"] == two.pid)
    warnings = without_losses(warnings)
    assert len(warnings) == 2 and all("does not show which of them this is" in each for each in warnings)
