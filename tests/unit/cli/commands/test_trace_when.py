"""`kinetoctl trace --when` against a scripted daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import captures
from support.service.captures import CONTENT
from support.service.cli import Result, run_here
from support.service.fake_profiler import Abort, FakeProfiler, FakeServer, WaitForCancel, serve

S = 10**9


def sample(second: int, utilization: float) -> pb.HostSample:
    found = pb.HostSample(time_ns=second * S)
    found.gpus.add(gpu=pb.Gpu(index=0), vendor="nvidia", utilization=utilization)
    found.processes.add(process=captures.process()).gpus.add(gpu=0, vendor="nvidia")
    return found


@pytest.fixture
def server() -> Iterator[FakeServer]:
    samples: list[pb.HostSample | Abort | WaitForCancel] = [
        sample(second, 0.9 if second < 2 else 0.2) for second in range(5)
    ]
    with serve(FakeProfiler(content=CONTENT, created=captures.capture(), host_samples=samples)) as running:
        yield running


class When:
    def __init__(self, server: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.profiler = server.profiler
        self._address, self._folder, self._capsys = server.address, folder, capsys

    def created(self) -> int:
        """How many captures were."""
        return sum(isinstance(each, pb.CreateCaptureRequest) for each in self.profiler.requests)

    def __call__(self, *arguments: str) -> Result:
        folder = ("--output-dir", str(self._folder))
        return run_here(self._capsys, self._address, "trace", "--pid", "4242", *folder, *arguments)


@pytest.fixture
def trace(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> When:
    ended = captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE)
    server.profiler.watches = [[captures.snapshot(ended)]]
    return When(server, tmp_path, capsys)


def test_the_trace_begins_once_the_condition_is_met(trace: When) -> None:
    result = trace("--when", "utilization<30% for 2s")
    assert result.code == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[:2] == [
        "waiting for utilization < 30 % for 2 s on a GPU of the processes",
        "GPU 0: utilization is 20 %; tracing",
    ]
    assert trace.created() == 1


def test_a_condition_that_is_not_met_ends_with_5_and_no_capture(trace: When) -> None:
    result = trace("--when", "utilization<10%")
    assert result.code == 5
    assert "--when utilization < 10 % for 5 s: the daemon ended its samples" in result.stderr
    assert "kinetoctl top" in result.stderr
    assert trace.created() == 0


def test_quiet_waits_without_a_word(trace: When) -> None:
    result = trace("--when", "utilization<30% for 2s", "--quiet")
    assert (result.code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--when-within", "1h"], "--when-within needs --when"),
        (["--when", "utilization<30%", "--start-at", "+10s"], "--when and a start time exclude each other"),
        (["--when", "utilization<30%", "--host", "n1"], "--when watches the GPUs of one host"),
        (["--when", "load>3"], "a GPU has no figure 'load'"),
    ],
)
def test_what_does_not_go_with_it_is_a_usage_error(trace: When, arguments: list[str], why: str) -> None:
    result = trace(*arguments)
    assert result.code == 2
    assert why in " ".join(result.stderr.replace("│", " ").split())
    assert trace.created() == 0
