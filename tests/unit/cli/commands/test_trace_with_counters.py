"""`kinetoctl trace --counters`: what it asks for and what it prints."""

from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.capture_summary import counter_lines
from support.service import captures
from support.service.cli import run_here
from support.service.fake_profiler import FakeProfiler, serve


def asked(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, pb.CaptureSpec | None, str]:
    """Exit code, the request and stderr of a trace that leaves its files where they are."""
    done = captures.snapshot(captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE))
    with serve(FakeProfiler(created=captures.capture(), watches=[[done]])) as server:
        where = ("--output-dir", str(folder), "--no-fetch")
        result = run_here(capsys, server.address, "trace", "--pid", "4242", *where, *arguments)
        requests = server.profiler.requests
        return result.code, requests[0].spec if requests else None, result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--counters"], pb.CounterRequest(set="overview")),
        (["--counters", "--duration", "1s"], pb.CounterRequest(set="overview")),
        (["--counters=memory"], pb.CounterRequest(set="memory")),
        (["--counters=a.avg, b.sum.per_second"], pb.CounterRequest(metrics=["a.avg", "b.sum.per_second"])),
        (["--counters=TPC.TriageCompute.a.avg"], pb.CounterRequest(metrics=["TPC.TriageCompute.a.avg"])),
        (["--counters", "--counter-interval", "100us"], pb.CounterRequest(set="overview", interval_ns=100_000)),
        (["--kineto-config", "CUPTI_PM_SAMPLING_METRICS=a.avg,b.sum"], pb.CounterRequest(metrics=["a.avg", "b.sum"])),
    ],
)
def test_each_way_to_name_counters_becomes_the_request(
    arguments: list[str], expected: pb.CounterRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, spec, _ = asked(capsys, tmp_path, *arguments)
    assert code == 0 and spec is not None
    assert (spec.HasField("counters"), spec.counters) == (True, expected)


def test_without_the_option_no_counters_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, spec, _ = asked(capsys, tmp_path)
    assert spec is not None and not spec.HasField("counters")


def test_the_option_takes_precedence_over_kinetos_key_which_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, spec, stderr = asked(capsys, tmp_path, "--counters=memory", "--kineto-config", "CUPTI_PM_SAMPLING_METRICS=a.avg")
    assert spec is not None and spec.counters == pb.CounterRequest(set="memory")
    assert "CUPTI_PM_SAMPLING_METRICS: no effect: --counters takes precedence" in stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--counters="], "expected a set listed by `kinetoctl counters sets`"),
        (["--counters=a.avg,,b"], "expected a set listed by `kinetoctl counters sets`"),
        (["--counters", "1234"], "1234 is not a counter set; if it is a process, put it before the option"),
        (["--counter-interval", "1ms"], "--counter-interval needs --counters"),
        (["--counters", "--counter-interval", "soon"], "'soon'"),
    ],
)
def test_what_cannot_be_meant_is_refused_here(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, spec, stderr = asked(capsys, tmp_path, *arguments)
    assert (code, spec) == (2, None) and why in stderr


def test_each_gpu_has_a_line_with_what_was_sampled_lost_and_refused() -> None:
    capture = pb.Capture()
    sampled = capture.counters.add(gpu=pb.Gpu(index=0, name="H200"), samples=1_000, gaps=1, lost_ns=3_000_000)
    sampled.metrics.add(name="dram__throughput", label="DRAM", unit="%")
    sampled.left_out.add(name="nvlrx__bytes", why="GH100 has no such metric")
    capture.counters.add(gpu=pb.Gpu(index=1), reason_code="COUNTERS_BUSY", reason="ncu (process 7) has its counters")
    early = capture.counters.add(gpu=pb.Gpu(index=2), samples=7, reason_code="COUNTERS_FAILED", reason="it was killed")
    early.metrics.add(name="dram__throughput", label="DRAM", unit="%")
    lines = [line.replace("\N{NARROW NO-BREAK SPACE}", " ") for line in counter_lines(capture)]
    assert lines == [
        "counters of GPU 0 (H200): 1,000 samples of DRAM; lost 3 ms in 1 gap",
        "counters of GPU 0 do not include nvlrx__bytes: GH100 has no such metric",
        "counters of GPU 1: ncu (process 7) has its counters [COUNTERS_BUSY]",
        "counters of GPU 2: 7 samples of DRAM; it was killed [COUNTERS_FAILED]",
    ]
