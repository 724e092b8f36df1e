"""`kinetoctl trace --when` against a scripted daemon."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.condition_wait import FIGURES, GpuCondition
from kinetoctl.options.capture_spec import parse_gpu_condition
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
        "waiting until a GPU of the processes has utilization < 30 % for 2 s",
        "GPU 0: utilization is 20 %; tracing now",
    ]
    assert trace.created() == 1


def test_a_condition_that_is_not_met_ends_with_5_and_no_capture(trace: When) -> None:
    result = trace("--when", "utilization<10%")
    assert result.code == 5
    assert "--when utilization < 10 % for 5 s: the daemon stopped sampling the GPUs" in result.stderr
    assert "kinetoctl top" in result.stderr
    assert trace.created() == 0


def test_quiet_waits_without_a_word(trace: When) -> None:
    result = trace("--when", "utilization<30% for 2s", "--quiet")
    assert (result.code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--when-within", "1h"], "--when-within needs --when"),
        (["--when", "utilization<30%", "--start-at", "+10s"], "--when and a start time cannot be combined"),
        (["--when", "utilization<30%", "--host", "n1"], "--when works with a single host only"),
        (["--when", "load>3"], "unknown GPU value 'load'"),
    ],
)
def test_what_does_not_go_with_it_is_a_usage_error(trace: When, arguments: list[str], why: str) -> None:
    result = trace(*arguments)
    assert result.code == 2
    assert why in " ".join(result.stderr.replace("│", " ").split())
    assert trace.created() == 0


NOWHERE = "unix:/nowhere.sock"


@pytest.fixture
def old_daemon() -> Iterator[FakeServer]:
    """It does not know GetClock, and would begin an armed capture at once."""
    with serve(FakeProfiler(processes=[pb.Process(pid=7, rank=3)])) as running:
        yield running


def test_a_daemon_that_cannot_wait_for_the_start_is_not_asked_to_record(
    old_daemon: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", "--host", old_daemon.address, "--rank", "all", "--output-dir", str(tmp_path)]
    result = run_here(capsys, NOWHERE, *command)
    assert result.code == 5
    assert "does not support this call" in result.stdout
    assert old_daemon.profiler.requests == []
    assert not list(tmp_path.iterdir())


def test_processes_are_listed_by_host(old_daemon: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(capsys, NOWHERE, "ps", "--host", old_daemon.address, "-o", "json")
    assert [(found["host"], found["pid"]) for found in result.json()] == [(old_daemon.address, 7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--require", "all"), "--require needs several hosts"),
        (("--no-merge",), "--no-merge needs several hosts"),
        (("--host", "a", "--wait-for-user-profiler"), "several hosts start at the same time and cannot wait"),
        (("--hosts", "/no/such/file"), "there is no file '/no/such/file'"),
        (("--host", "a", "--host-address", "node:1"), "expected an address with {host}"),
        (("--host", "a", "--require", "most"), "'most' is not one of 'all', 'quorum', 'any'"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_here(capsys, NOWHERE, "trace", "--pid", "7", "--output-dir", str(tmp_path), *arguments)
    assert result.code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "figure", "below", "limit", "lasts_s"),
    [
        ("sm_active<30%", "sm_active", True, 0.3, 5),
        (" sm_active < 0.3 for 10s ", "sm_active", True, 0.3, 10),
        ("utilization>95% for 500ms", "utilization", False, 0.95, 0.5),
        ("power_watts>650.5 for 2min", "power_watts", False, 650.5, 120),
        ("nvlink_transmit_bytes_per_second<1e9", "nvlink_transmit_bytes_per_second", True, 1e9, 5),
    ],
)
def test_a_condition_has_a_figure_a_limit_and_how_long_it_has_to_hold(
    text: str, figure: str, below: bool, limit: float, lasts_s: float
) -> None:
    found = parse_gpu_condition(text)
    assert found == GpuCondition(figure=figure, below=below, limit=limit, lasts_ns=int(lasts_s * S))
    assert found.holds(limit - 0.01) == below and found.holds(limit + 0.01) != below and not found.holds(limit)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected NAME<NUMBER"),
        ("sm_active", "expected NAME<NUMBER"),
        ("sm_active=30%", "expected NAME<NUMBER"),
        ("sm_active<30% for", "expected NAME<NUMBER"),
        ("sm_active<1.2.3", "'1.2.3' is not a number"),
        ("sm_active<1e999", "'1e999' is not a number"),
        ("sm_activity<30%", "unknown GPU value 'sm_activity'; expected one of utilization, "),
        ("sm_active<30", "sm_active is a fraction: give its limit as 0% to 100%"),
        ("sm_active<-1%", "sm_active is a fraction"),
        ("power_watts>90%", "power_watts is not a fraction"),
        ("sm_active<30% for 0s", "expected a duration above zero"),
        ("sm_active<30% for soon", "soon"),
    ],
)
def test_what_is_wrong_with_a_condition_is_told(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_gpu_condition(text)


def test_a_condition_is_shown_as_people_read_it() -> None:
    assert str(parse_gpu_condition("sm_active<0.3 for 90s")) == "sm_active < 30 % for 1 min 30 s"
    assert str(parse_gpu_condition("power_watts>650")) == "power_watts > 650 for 5 s"


def test_every_figure_that_grows_and_falls_is_there() -> None:
    fields = pb.GpuSample.DESCRIPTOR.fields
    measured = {each.name for each in fields if each.type == FieldDescriptor.TYPE_DOUBLE}
    assert set(FIGURES) == measured - {"power_limit_watts"}
