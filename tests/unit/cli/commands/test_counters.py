"""`kinetoctl counters` against a scripted daemon."""

import json
import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.cli import Result, Run, run_here
from support.service.fake_profiler import Abort, FakeProfiler, FakeServer, serve

DRAM = pb.CounterMetric(name="dram__throughput.avg.pct", label="DRAM", unit="%")
PCIE = pb.CounterMetric(name="pcie__read_bytes.sum.per_second", label="PCIe read", unit="B/s")
FMA = pb.LeftOutMetric(name="sm__pipe_fma", why="it needs 2 passes beside the others")
LISTED = pb.ListCountersResponse(
    backend="cupti",
    library_version="130001",
    gpus=[
        pb.CounterGpu(
            gpu=pb.Gpu(index=0, uuid="GPU-a", name="NVIDIA H200"),
            chip="GH100",
            sets=[
                pb.CounterSet(name="overview", metrics=[DRAM, PCIE], left_out=[FMA]),
                pb.CounterSet(name="interconnect", problem="GH100 has no metric of this set"),
            ],
            base_metrics=["pcie__read_bytes", "dram__throughput"],
        ),
        pb.CounterGpu(
            gpu=pb.Gpu(index=1, uuid="GPU-b", name="MIG"), reason_code="COUNTERS_UNAVAILABLE", reason="MIG is on"
        ),
    ],
)


def means(**more: Any) -> pb.CounterMeans:
    gpu = pb.GpuCounters(
        gpu=0, uuid="GPU-a", start_ns=10**18, end_ns=10**18 + 10**9, samples=1000, metrics=[DRAM, PCIE],
        means=[86.72, math.nan], maxima=[99.0, 2.5e9], left_out=[FMA], **more,
    )  # fmt: skip
    return pb.CounterMeans(gpus=[gpu])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serve(FakeProfiler(counters=LISTED, counter_means=[means(), means(lost_ns=2_500_000)])) as running:
        yield running


@pytest.fixture
def run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_here(capsys, server.address, "counters", *arguments)


def rows(result: Result) -> list[list[str]]:
    return [line.split("  ") for line in result.stdout.splitlines()]


def words(result: Result) -> list[list[str]]:
    return [[cell.strip() for cell in row if cell.strip()] for row in rows(result)]


def test_list_says_which_gpus_can_be_sampled_and_why_others_cannot(run: Run) -> None:
    assert words(run("list")) == [
        ["GPU", "NAME", "CHIP", "COUNTERS", "UUID", "WHY NOT"],
        ["0", "NVIDIA H200", "GH100", "yes", "GPU-a", "-"],
        ["1", "MIG", "-", "COUNTERS_UNAVAILABLE", "GPU-b", "MIG is on"],
    ]


def test_list_prints_the_names_that_a_gpu_has(run: Run, server: FakeServer) -> None:
    assert run("list", "--metrics").stdout == "0  dram__throughput\n0  pcie__read_bytes\n"
    assert server.profiler.requests[-1].base_metrics


def test_sets_show_what_is_sampled_and_what_is_left_out(run: Run) -> None:
    result = run("sets")
    assert words(result)[1:] == [
        ["0", "overview", "DRAM", "%", "dram__throughput.avg.pct"],
        ["0", "overview", "PCIe read", "B/s", "pcie__read_bytes.sum.per_second"],
        ["0", "overview", "-", "-", "sm__pipe_fma: it needs 2 passes beside the others"],
        ["0", "interconnect", "-", "-", "GH100 has no metric of this set"],
    ]
    assert result.stderr == "GPU 1 cannot be sampled: MIG is on\n"


def test_watch_prints_means_and_what_was_lost(run: Run, server: FakeServer) -> None:
    result = run("watch", "--gpu", "0", "--counter-interval", "100us", "--interval", "500ms", "--set", "memory")
    assert words(result) == [
        ["GPU", "SHOWN AS", "MEAN", "MOST", "UNIT", "SAMPLES", "LOST"],
        ["0", "DRAM", "86.7", "99.0", "%", "1000 in 1 s", "-"],
        ["0", "PCIe read", "-", "2.5 G", "B/s", "1000 in 1 s", "-"],
        ["GPU", "SHOWN AS", "MEAN", "MOST", "UNIT", "SAMPLES", "LOST"],
        ["0", "DRAM", "86.7", "99.0", "%", "1000 in 1 s", "2.5 ms"],
        ["0", "PCIe read", "-", "2.5 G", "B/s", "1000 in 1 s", "2.5 ms"],
    ]
    asked = server.profiler.requests[-1]
    assert (list(asked.gpus), asked.set, asked.interval_ns, asked.period_ns) == ([0], "memory", 100_000, 500_000_000)


def test_one_answer_names_what_is_left_out(run: Run) -> None:
    result = run("watch", "--once")
    assert len(rows(result)) == 3
    assert result.stderr == "GPU 0: sm__pipe_fma is left out: it needs 2 passes beside the others\n"


def test_json_has_a_line_for_each_answer_and_null_for_no_value(run: Run) -> None:
    lines = [json.loads(line) for line in run("watch", "-o", "json").stdout.splitlines()]
    assert [line["gpus"][0]["means"] for line in lines] == [[86.72, None]] * 2
    assert run("watch", "--once", "-o", "yaml").stdout.count("uuid:") == 1


def test_metrics_and_a_set_exclude_each_other(run: Run) -> None:
    result = run("watch", "--set", "memory", "dram__throughput.avg")
    assert (result.code, "cannot be combined" in result.stderr) == (2, True)


def test_a_sampling_that_ends_by_itself_is_an_error(run: Run, server: FakeServer) -> None:
    server.profiler.counter_means = [means(reason_code="COUNTERS_FAILED", reason="kinetod-counters has ended")]
    result = run("watch")
    assert (result.code, "GPU 0: kinetod-counters has ended" in result.stderr) == (5, True)


def test_a_gpu_without_the_metrics_is_told_once_and_the_others_are_watched(run: Run, server: FakeServer) -> None:
    lacks = pb.GpuCounters(gpu=1, uuid="GPU-b", reason_code="COUNTERS_INVALID_METRIC", reason="MI300 has no DRAM")
    server.profiler.counter_means = [pb.CounterMeans(gpus=[*means().gpus, lacks])] * 2
    result = run("watch")
    assert (result.code, result.stderr) == (0, "GPU 1 is not watched: MI300 has no DRAM\n")
    assert [row[0] for row in words(result)] == ["GPU", "0", "0"] * 2
    document = json.loads(run("watch", "--once", "-o", "json").stdout)
    assert [gpu["reason_code"] for gpu in document["gpus"]] == ["", "COUNTERS_INVALID_METRIC"]


def test_a_gpu_that_somebody_else_measures_is_told_with_its_code(run: Run, server: FakeServer) -> None:
    busy = "GPU GPU-a: Nsight Compute (process 7) has its counters"
    server.profiler.counter_means = [Abort(grpc.StatusCode.FAILED_PRECONDITION, busy, "COUNTERS_BUSY")]
    result = run("watch")
    assert (result.code, f"{busy} [COUNTERS_BUSY]" in result.stderr) == (5, True)
