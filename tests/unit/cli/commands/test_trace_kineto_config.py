"""`kinetoctl trace --kineto-config` against a scripted daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import captures
from support.service.captures import CONTENT
from support.service.cli import Result, run_here
from support.service.fake_profiler import FakeProfiler, FakeServer, serve


@pytest.fixture
def server() -> Iterator[FakeServer]:
    plain = captures.target(
        state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_DONE, files=(captures.trace_file(file_format="chrome-json"),)
    )
    ended = captures.capture(plain, status=pb.CAPTURE_STATUS_DONE)
    with serve(FakeProfiler(content=CONTENT, created=captures.capture())) as running:
        running.profiler.watches = [[captures.snapshot(ended)]]
        yield running


@pytest.fixture
def trace(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> "Trace":
    monkeypatch.chdir(tmp_path)
    return Trace(server, capsys)


class Trace:
    """Runs `kinetoctl trace --pid 4242` with the fake daemon."""

    def __init__(self, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.profiler = server.profiler
        self._address = server.address
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Result:
        return run_here(self._capsys, self._address, "trace", "--pid", "4242", *arguments)

    def spec(self) -> pb.CaptureSpec:
        spec: pb.CaptureSpec = self.profiler.requests[0].spec
        return spec


def config_notes(result: Result) -> list[str]:
    prefix = "kineto config: "
    return [line.removeprefix(prefix) for line in result.stderr.splitlines() if line.startswith(prefix)]


def test_a_configuration_file_makes_the_request_that_options_would(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "kineto.conf").write_text(
        "# base\nACTIVITIES_DURATION_MSECS=250  # ms\nACTIVITY_TYPES=cpu_op,kernel\nPROFILE_REPORT_INPUT_SHAPES=true\n"
        "PROFILE_WITH_STACK=yes\nPROFILE_WITH_FLOPS=1\nPROFILE_WITH_MODULES=t\nPROFILE_PROFILE_MEMORY=y\n"
        "ACTIVITIES_WARMUP_PERIOD_SECS=1\nACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=64\nREQUEST_TRACE_ID=17\n"
    )
    assert trace("--kineto-config", "kineto.conf").code == 0
    assert trace.spec() == pb.CaptureSpec(
        selector=pb.Selector(pids=[4242]),
        duration_ns=250_000_000,
        warmup_ns=1_000_000_000,
        activity_types=["cpu_op", "kernel"],
        options=pb.Options(
            record_shapes=True, with_stack=True, with_flops=True, with_modules=True, profile_memory=True
        ),
        buffer_limit_bytes=64 << 20,
        labels={"request_trace_id": "17"},
    )


def test_iterations_come_from_the_configuration_too(trace: Trace) -> None:
    trace("--kineto-config", "PROFILE_START_ITERATION=0,PROFILE_START_ITERATION_ROUNDUP=100,ACTIVITIES_ITERATIONS=4")
    assert trace.spec().iterations == pb.IterationWindow(count=4, roundup=100)
    assert not trace.spec().iterations.HasField("start")


def test_a_duration_beside_iterations_is_for_processes_that_never_step(trace: Trace) -> None:
    result = trace("--kineto-config", "ACTIVITIES_ITERATIONS=4,ACTIVITIES_DURATION_MSECS=300")
    assert trace.spec().iterations == pb.IterationWindow(count=4)
    assert trace.spec().or_duration_ns == 300_000_000
    assert config_notes(result) == []


def test_the_file_gets_the_name_that_the_configuration_asks_for(trace: Trace, tmp_path: Path) -> None:
    result = trace("--kineto-config", f"ACTIVITIES_LOG_FILE={tmp_path}/traces/x.pt.trace.json")
    assert result.code == 0
    assert trace.spec().formats == ["chrome-json"]
    assert (tmp_path / "traces" / "x_4242.pt.trace.json").read_bytes() == CONTENT
    assert str(tmp_path) not in str(trace.spec())  # no path leaves this machine
    assert f"{tmp_path}/traces/x_4242.pt.trace.json" in result.stdout


def test_a_file_that_is_there_stays_and_the_trace_gets_its_usual_name(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "x_4242.json").write_text("another trace")
    result = trace("--kineto-config", "ACTIVITIES_LOG_FILE=x.json")
    assert result.code == 0
    assert "x_4242.json already exists and is not this trace; using the usual file name" in result.stderr
    assert (tmp_path / "x_4242.json").read_text() == "another trace"
    assert (tmp_path / "kineto-gpu-7-4242-c0ffee.json").read_bytes() == CONTENT


def test_options_count_more_than_keys_and_say_so(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "k.conf").write_text(
        "ACTIVITIES_DURATION_MSECS=250\nACTIVITY_TYPES=kernel\nACTIVITIES_LOG_FILE=/nowhere/x.json\nPROFILE_WITH_STACK=1\n"
    )
    result = trace(
        *("--kineto-config", "k.conf", "--duration", "2s", "--activities", "cpu_op", "--with-stack=trace"),
        *("--output-dir", str(tmp_path / "here"), "--format", "chrome"),
    )
    assert config_notes(result) == [
        "k.conf:1: ACTIVITIES_DURATION_MSECS: no effect: --duration takes precedence",
        "k.conf:2: ACTIVITY_TYPES: no effect: --activities takes precedence",
        "k.conf:4: PROFILE_WITH_STACK: no effect: --with-stack takes precedence",
        "k.conf:3: ACTIVITIES_LOG_FILE: the folder given here is ignored: --output-dir takes precedence",
        "k.conf:3: ACTIVITIES_LOG_FILE: its suffix has no effect: --format takes precedence",
    ]
    spec = trace.spec()
    assert (spec.duration_ns, [*spec.activity_types], [*spec.formats]) == (2_000_000_000, ["cpu_op"], ["chrome"])
    assert spec.options == pb.Options(with_stack=True, stack_trace=True)
    assert (tmp_path / "here" / "x_4242.json").exists()


def test_an_option_that_says_the_same_is_no_conflict(trace: Trace) -> None:
    result = trace("--kineto-config", "ACTIVITIES_DURATION_MSECS=250,PROFILE_WITH_FLOPS=1", "--duration", "250ms")
    assert config_notes(result) == []


def test_a_duration_on_the_command_line_leaves_no_iterations(trace: Trace) -> None:
    result = trace("--kineto-config", "ACTIVITIES_ITERATIONS=4,PROFILE_START_ITERATION_ROUNDUP=9", "--duration", "1s")
    assert config_notes(result) == [
        "ACTIVITIES_ITERATIONS: no effect: --duration takes precedence",
        "PROFILE_START_ITERATION_ROUNDUP: no effect: --duration takes precedence",
    ]
    assert trace.spec().duration_ns == 1_000_000_000


def test_iterations_on_the_command_line_leave_no_duration(trace: Trace) -> None:
    result = trace(
        "--kineto-config", "ACTIVITIES_DURATION_MSECS=4,ACTIVITIES_WARMUP_PERIOD_SECS=5", "--iterations", "3"
    )
    assert len(config_notes(result)) == 2
    assert trace.spec().iterations == pb.IterationWindow(count=3)
    assert trace.spec().warmup_ns == 0


def test_several_configurations_are_laid_over_each_other(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "base.conf").write_text("PROFILE_WITH_STACK=1\nPROFILE_WITH_FLOPS=1\n")
    trace("--kineto-config", "base.conf", "--kineto-config", "PROFILE_WITH_STACK=0")
    assert trace.spec().options == pb.Options(with_flops=True)


def test_options_of_operators_mean_nothing_without_operators_as_in_kineto(trace: Trace) -> None:
    result = trace("--kineto-config", "ACTIVITY_TYPES=kernel,PROFILE_REPORT_INPUT_SHAPES=1")
    assert config_notes(result) == [
        "PROFILE_REPORT_INPUT_SHAPES: no effect: it applies to cpu_op, which is not recorded"
    ]
    assert not trace.spec().options.record_shapes


def test_a_label_of_the_command_line_counts_more(trace: Trace) -> None:
    trace("--kineto-config", "REQUEST_TRACE_ID=1,REQUEST_GROUP_TRACE_ID=2", "--label", "request_trace_id=mine")
    assert trace.spec().labels == {"request_trace_id": "mine", "request_group_trace_id": "2"}


def test_notes_are_not_said_with_quiet(trace: Trace) -> None:
    assert trace("--quiet", "--kineto-config", "ENABLE_IPC_FABRIC=1").stderr == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ACTIVITIES_DURATION_MSECS=soon", "--kineto-config: ACTIVITIES_DURATION_MSECS: expected a whole number"),
        ("/etc/no/such.conf", "--kineto-config: expected KEY=VALUE,… or a file, got '/etc/no/such.conf': No such file"),
        ("ACTIVITIES_LOG_FILE=/tmp/", "--kineto-config: ACTIVITIES_LOG_FILE: expected a file path, got '/tmp/'"),
        ("ACTIVITIES_ENABLED=no", "--kineto-config: ACTIVITIES_ENABLED: tracing is switched off"),
        ("PROFILE_START_TIME=1000", "--kineto-config: PROFILE_START_TIME: this is "),
    ],
)
def test_a_configuration_that_cannot_be_used_is_code_2_and_asks_nothing(trace: Trace, text: str, message: str) -> None:
    result = trace("--kineto-config", text)
    assert (result.code, result.stdout) == (2, "")
    assert message in result.stderr
    assert trace.profiler.requests == []


def test_a_file_is_named_with_its_line(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "k.conf").write_text("\nPROFILE_WITH_STACK=perhaps\n")
    assert "k.conf:2: PROFILE_WITH_STACK: expected yes or no" in trace("--kineto-config", "k.conf").stderr
