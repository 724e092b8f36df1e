"""`kinetoctl trace` against a scripted daemon."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.daemon_client import Patience
from kinetoctl.errors import CliError
from support.service import captures
from support.service.captures import CONTENT
from support.service.cli import Result, environment, kinetoctl, run_here, run_process
from support.service.fake_profiler import WAIT_FOR_CANCEL, Abort, FakeServer, StreamItem
from support.small_disk import small_disk
from support.waiting import scaled, scaled_option

NAME = "kineto-gpu-7-4242-c0ffee.json.gz"


@pytest.fixture
def trace(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Trace":
    return Trace(server, tmp_path, capsys)


class Trace:
    """Runs `kinetoctl trace --pid 4242` with the fake daemon."""

    def __init__(self, server: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.profiler = server.profiler
        self._address = server.address
        self._folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Result:
        folder = ("--output-dir", str(self._folder))
        return run_here(self._capsys, self._address, "trace", "--pid", "4242", *folder, *arguments)

    def spec(self) -> pb.CaptureSpec:
        spec: pb.CaptureSpec = self.profiler.requests[0].spec
        return spec


def ended(*targets: pb.Target, status: pb.CaptureStatus = pb.CAPTURE_STATUS_DONE) -> pb.CaptureEvent:
    return captures.snapshot(captures.capture(*targets, status=status))


def happy_script() -> list[pb.CaptureEvent]:
    return [
        captures.snapshot(captures.capture()),
        captures.change(captures.target(state=pb.TARGET_STATE_COLLECT)),
        captures.change(captures.target(state=pb.TARGET_STATE_STORE)),
        ended(captures.done_target()),
    ]


def test_a_done_capture_ends_with_a_verified_file_and_code_0(trace: Trace, tmp_path: Path) -> None:
    trace.profiler.watches = [[*happy_script()]]
    result = trace()
    assert result.code == 0
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert f"{tmp_path / NAME} (300.0 KiB, SHA-256 verified)" in result.stdout


def test_each_state_is_one_line_on_stderr(trace: Trace) -> None:
    trace.profiler.watches = [[*happy_script()]]
    assert trace().stderr.splitlines() == [
        "capture c0ffee on gpu-7",
        "pid 4242, rank 0: PENDING",
        "pid 4242, rank 0: COLLECT",
        "pid 4242, rank 0: STORE",
        "pid 4242, rank 0: DONE",
    ]


def test_quiet_says_nothing_on_stderr(trace: Trace) -> None:
    trace.profiler.watches = [[*happy_script()]]
    result = trace("--quiet")
    assert (result.code, result.stderr) == (0, "")


def test_json_output_is_the_whole_capture_with_local_paths(trace: Trace, tmp_path: Path) -> None:
    trace.profiler.watches = [[*happy_script()]]
    document = trace("-o", "json").json()
    assert document["id"] == "c0ffee"
    assert document["status"] == "CAPTURE_STATUS_DONE"
    assert document["created_ns"] == 1_700_000_000_000_000_000
    assert document["spec"] is None  # the scripted capture has none
    assert document["targets"][0]["process"]["rank"] == 0
    assert document["targets"][0]["files"][0]["path"] == str(tmp_path / NAME)


def test_a_broken_watch_is_resumed(trace: Trace) -> None:
    broken: list[StreamItem] = [captures.snapshot(captures.capture()), Abort(grpc.StatusCode.UNAVAILABLE)]
    stopped: list[StreamItem] = [captures.snapshot(captures.capture()), Abort(grpc.StatusCode.CANCELLED)]
    trace.profiler.watches = [[*broken], [*stopped], [ended(captures.done_target())]]
    assert trace().code == 0
    watches = [request for request in trace.profiler.requests if isinstance(request, pb.WatchCaptureRequest)]
    assert [request.id for request in watches] == ["c0ffee", "c0ffee", "c0ffee"]


def test_a_capture_in_which_nothing_changes_for_long_is_still_followed(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_patience: Patience, error: CliError) -> None:
        raise error

    monkeypatch.setattr(Patience, "wait", lost)
    waiting: list[StreamItem] = [captures.snapshot(captures.capture()), Abort(grpc.StatusCode.DEADLINE_EXCEEDED)]
    trace.profiler.watches = [[*waiting], [*waiting], [ended(captures.done_target())]]
    trace.profiler.stored = captures.capture()
    assert trace().code == 0


def test_a_watch_that_just_ends_asks_how_the_capture_is(trace: Trace) -> None:
    trace.profiler.watches = [[captures.snapshot(captures.capture())]]
    trace.profiler.stored = captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE)
    assert trace().code == 0


def test_a_daemon_that_stays_away_is_code_7_and_says_how_to_go_on(trace: Trace) -> None:
    trace.profiler.watches = [[Abort(grpc.StatusCode.UNAVAILABLE, "gone")]]
    result = trace("--timeout", scaled_option(2))  # which is also how long the answer to its request may take
    assert result.code == 7
    assert "`kinetoctl captures show c0ffee` shows how the capture ended" in result.stderr


def test_a_partial_trace_is_fetched_and_code_4(trace: Trace, tmp_path: Path) -> None:
    target = captures.target(
        state=pb.TARGET_STATE_ENDED,
        verdict=pb.VERDICT_PARTIAL,
        reason_code="TARGET_EXITED",
        reason="process 4242 was killed by SIGKILL after 1.2 s",
        files=(captures.trace_file(),),
    )
    trace.profiler.watches = [[ended(target, status=pb.CAPTURE_STATUS_PARTIAL)]]
    result = trace()
    assert result.code == 4
    assert (tmp_path / NAME).exists()
    assert "process 4242 was killed by SIGKILL after 1.2 s [TARGET_EXITED]" in result.stdout


def test_a_failed_capture_is_code_5_with_the_reason(trace: Trace, tmp_path: Path) -> None:
    target = captures.target(
        state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_FAILED, reason_code="AGENT_SILENT", reason="no answer in 10 s"
    )
    trace.profiler.watches = [[ended(target, status=pb.CAPTURE_STATUS_FAILED)]]
    result = trace()
    assert result.code == 5
    assert "no answer in 10 s [AGENT_SILENT]" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_capture_cancelled_by_somebody_else_is_code_8(trace: Trace) -> None:
    target = captures.target(state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_CANCELLED)
    trace.profiler.watches = [[ended(target, status=pb.CAPTURE_STATUS_CANCELLED)]]
    assert trace().code == 8


def test_a_file_that_does_not_verify_is_code_5(trace: Trace, tmp_path: Path) -> None:
    trace.profiler.content = b"z" * len(CONTENT)
    trace.profiler.watches = [[*happy_script()]]
    result = trace()
    assert result.code == 5
    assert "pid 4242, rank 0: the SHA-256 of the received chrome file is" in result.stderr
    assert not (tmp_path / NAME).exists()


def test_one_file_of_two_is_code_4(trace: Trace, tmp_path: Path) -> None:
    trace.profiler.watches = [[ended(captures.done_target(), captures.done_target(4343))]]
    (tmp_path / "kineto-gpu-7-4343-c0ffee.json.gz").write_bytes(b"another")
    assert trace().code == 4


def test_done_without_a_file_is_not_believed(trace: Trace) -> None:
    trace.profiler.watches = [[ended(captures.target(state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_DONE))]]
    result = trace()
    assert result.code == 5
    assert "the daemon reports DONE, but lists no file" in result.stderr


def test_no_fetch_leaves_the_file_and_says_how_to_get_it(trace: Trace, tmp_path: Path) -> None:
    trace.profiler.watches = [[*happy_script()]]
    result = trace("--no-fetch")
    assert result.code == 0
    assert "`kinetoctl captures fetch c0ffee`" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert not any(
        isinstance(each, pb.GetCaptureRequest) for each in trace.profiler.requests
    )  # it waits for no verdict


def test_the_verdict_stands_first_and_in_the_document(trace: Trace) -> None:
    trace.profiler.stored = captures.capture(captures.done_target())
    trace.profiler.stored.answer.verdict = "A step takes 51 ms on average."
    trace.profiler.watches = [[*happy_script()]]
    lines = trace().stdout.splitlines()
    assert lines[:2] == ["A step takes 51 ms on average.", "capture c0ffee on gpu-7: DONE"]
    trace.profiler.watches = [[*happy_script()]]
    assert trace("-o", "json").json()["answer"]["verdict"] == lines[0]


def test_the_report_comes_behind_the_summary_and_its_exit_code_counts(trace: Trace, tmp_path: Path) -> None:
    event = {"ph": "X", "name": "ProfilerStep#0", "cat": "user_annotation", "pid": 7, "tid": 7, "dur": 50}
    events = [{**event, "name": f"ProfilerStep#{number}", "ts": 1_000 + 50 * number} for number in range(3)]
    events.append({**event, "name": "aten::mm", "cat": "cpu_op", "ts": 1_010, "dur": 20})
    whole = json.dumps({"traceEvents": events}).encode()
    for content, code, told in ((whole, 0, "A step takes 50 µs"), (whole[:-30], 4, "The file is truncated")):
        trace.profiler.content = content
        done = ended(captures.done_target(content=content))
        trace.profiler.watches = [[*happy_script()[:-1], done]]
        result = trace("--report", "--output-dir", str(tmp_path / str(code)))
        assert result.code == code, result
        summary, _, report = result.stdout.partition("\n\n" + told)
        assert report and "kinetoctl report" in summary
    assert not any(isinstance(request, pb.GetCaptureRequest) for request in trace.profiler.requests)  # no other answer


def test_a_report_needs_the_files_and_is_in_tables(trace: Trace) -> None:
    for arguments, message in (
        (
            ("--no-fetch",),
            "--report needs the files that --no-fetch leaves in the daemon's store: use only one of them",
        ),
        (("-o", "json"), "--report only prints tables: leave it out, then run `kinetoctl report -o json`"),
    ):
        result = trace("--report", *arguments)
        assert (result.code, message in " ".join(result.stderr.split())) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.NOT_FOUND, "NO_SUCH_PROCESS", 3),
        (grpc.StatusCode.FAILED_PRECONDITION, "NO_AGENT", 5),
        (grpc.StatusCode.PERMISSION_DENIED, "NOT_YOUR_PROCESS", 6),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", 2),
    ],
)
def test_a_refused_capture_tells_the_daemons_words(
    trace: Trace, code: grpc.StatusCode, reason: str, expected: int
) -> None:
    trace.profiler.created = Abort(code, "pid 4242: that does not go", reason)
    result = trace()
    assert (result.code, result.stdout) == (expected, "")
    assert result.stderr.startswith(f"error: pid 4242: that does not go [{reason}]\n")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("spec.duration_ns: 2 h is longer than 10 min", "--duration: 2 h is longer than 10 min"),
        ("spec.activity_types[0]: unknown activity type 'kernal'", "--activities: unknown activity type 'kernal'"),
        ("spec.labels['a b']: no key", "--label: no key"),
        ("spec.options.stack_sample_hz: must be 0 to 1000", "--stack-hz: must be 0 to 1000"),
        ("spec.buffer_limit_bytes: must not be negative", "--buffer-limit: must not be negative"),
        ("spec.iterations.start: must not be negative", "--start-iteration: must not be negative"),
        ("spec.unheard_of: must not be negative", "spec.unheard_of: must not be negative"),
    ],
)
def test_what_the_daemon_says_of_a_field_is_said_of_the_option(trace: Trace, said: str, told: str) -> None:
    trace.profiler.created = Abort(grpc.StatusCode.INVALID_ARGUMENT, said, "INVALID_FIELD")
    result = trace()
    assert (result.code, result.stderr.splitlines()[0]) == (2, f"error: {told} [INVALID_FIELD]")


def test_the_request_carries_every_option(trace: Trace) -> None:
    trace.profiler.watches = [[*happy_script()]]
    trace(
        *("--pid", "4343", "--command", "train.*", "--user", "ada", "--rank", "0,8-9", "--job-id", "77"),
        *(
            "--duration",
            "500ms",
            "--warmup",
            "1s",
            "--activities",
            "kernel,gpu_memcpy",
            "--with-stack",
            "--stack-hz",
            "50",
        ),
        *("--buffer-limit", "256MiB", "--format", "chrome", "--format", "chrome-json", "--label", "team=vision"),
        *("--idempotency-key", "once"),
    )
    assert trace.profiler.requests[0] == pb.CreateCaptureRequest(
        idempotency_key="once",
        spec=pb.CaptureSpec(
            selector=pb.Selector(
                pids=[4242, 4343], command_regex="train.*", user="ada", ranks=[0, 8, 9], job_ids=["77"]
            ),
            duration_ns=500_000_000,
            warmup_ns=1_000_000_000,
            activity_types=["kernel", "gpu_memcpy"],
            options=pb.Options(with_stack=True, stack_sample_hz=50),
            buffer_limit_bytes=268_435_456,
            formats=["chrome", "chrome-json"],
            labels={"team": "vision"},
        ),
    )


def test_the_selector_carries_every_condition(trace: Trace) -> None:
    trace.profiler.watches = [[*happy_script()]]
    uid, container = "8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b", "4f" * 32
    trace(
        *("--children", "--gpu", "0,2-3", "--rank", "all", "--job-id", "77", "--job-id", "78", "--job-step", "batch"),
        *("--pod-uid", uid, "--container-id", f"containerd://{container}", "--helpers"),
    )
    assert trace.spec().selector == pb.Selector(
        pids=[4242],
        children=True,
        gpus=[0, 2, 3],
        ranks=[-1],
        job_ids=["77", "78"],
        job_step="batch",
        pod_uids=[uid],
        container_ids=[container],
        helpers=True,
    )


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], pb.Options()),
        (["--record-shapes"], pb.Options(record_shapes=True)),
        (["--with-stack"], pb.Options(with_stack=True)),
        (["--with-stack=sample"], pb.Options(with_stack=True)),
        (["--with-stack=trace"], pb.Options(with_stack=True, stack_trace=True)),
        (["--with-stack", "--stack-hz", "50"], pb.Options(with_stack=True, stack_sample_hz=50)),
        (["--with-modules"], pb.Options(with_modules=True)),
        (["--with-flops"], pb.Options(with_flops=True)),
        (["--memory"], pb.Options(profile_memory=True)),
        (["--wait-for-user-profiler"], pb.Options(wait_for_user_profiler=True)),
    ],
)
def test_each_option_of_the_recording_is_in_the_request(
    trace: Trace, arguments: list[str], options: pb.Options
) -> None:
    trace.profiler.watches = [[*happy_script()]]
    assert trace(*arguments).code == 0
    assert trace.spec().options == options


def test_an_agent_may_be_forbidden_or_sent_away_at_once(trace: Trace) -> None:
    trace.profiler.watches = [[*happy_script()]]
    trace("--keep-agent", "0", "--no-attach")
    assert (trace.spec().no_attach, trace.spec().keep_agent_ns) == (True, 0)
    trace.profiler.requests.clear()
    trace.profiler.watches = [[*happy_script()]]
    trace()
    assert not trace.spec().HasField("keep_agent_ns")


def test_five_seconds_are_the_default(trace: Trace) -> None:
    trace.profiler.watches = [[*happy_script()]]
    trace()
    assert trace.spec().duration_ns == 5_000_000_000
    assert len(trace.profiler.requests[0].idempotency_key) == 32


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--iterations", "20"], pb.CaptureSpec(iterations=pb.IterationWindow(count=20))),
        (
            ["--iterations", "20", "--or-duration", "5s"],
            pb.CaptureSpec(iterations=pb.IterationWindow(count=20), or_duration_ns=5_000_000_000),
        ),
        (
            ["--iterations=20", "--start-iteration=100", "--roundup=50", "--warmup-iterations=2"],
            pb.CaptureSpec(iterations=pb.IterationWindow(count=20, start=100, roundup=50, warmup=2)),
        ),
    ],
)
def test_iterations_take_the_place_of_the_duration(
    trace: Trace, arguments: list[str], expected: pb.CaptureSpec
) -> None:
    trace.profiler.watches = [[*happy_script()]]
    trace(*arguments)
    expected.selector.pids.append(4242)
    expected.options.SetInParent()
    assert trace.spec() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--duration", "1s", "--iterations", "3"], "--duration and --iterations cannot be combined"),
        (["--roundup", "3"], "--roundup needs --iterations"),
        (["--or-duration", "5s"], "--or-duration needs --iterations"),
        (["--iterations", "3", "--warmup", "1s"], "use --warmup-iterations with --iterations"),
        (["--iterations", "3", "--start-at", "+5s"], "use --start-iteration with --iterations"),
        (["--duration", "soon"], "--duration: expected a duration like 500ms, 5s or 2min, got 'soon'"),
        (["--duration", "0s"], "--duration: expected a duration above zero, got '0s'"),
        (["--duration", "-5s"], "--duration: expected a duration above zero, got '-5s'"),
        (["--duration", "7d"], "--duration: expected at most 24h, got '7d': a longer trace would not fit on a disk"),
        (["--iterations", "0"], "--iterations: 0 is not in the range x>=1."),
        (["--wait-for-user-profiler", "--start-at", "+5s"], "a capture with a start time cannot wait"),
        (["--with-stack=all"], "--with-stack: 'all' is not one of 'sample', 'trace'."),
        (["--with-stack=trace", "--stack-hz", "50"], "--stack-hz needs sampled stacks"),
        (["--record-shapes", "--activities", "kernel"], "--record-shapes describes operators, so --activities"),
        (["--with-modules", "--activities", "kernel"], "--with-modules describes operators, so --activities"),
        (["--with-flops", "--activities", "kernel"], "--with-flops describes operators, so --activities"),
        (["--pid", "0"], "--pid: 0 is not in the range 1<=x<=4194304."),
        (["--output-dir", "/proc/nowhere"], "--output-dir: /proc/nowhere cannot be created: No such file or directory"),
    ],
)
def test_wrong_usage_is_code_2_and_asks_nothing(trace: Trace, arguments: list[str], message: str) -> None:
    result = trace(*arguments)
    assert (result.code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "See `kinetoctl trace --help`." in result.stderr
    assert trace.profiler.requests == []


def test_a_trace_of_nothing_in_particular_is_refused(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(capsys, server.address, "trace")
    assert result.code == 2
    assert "no process is selected: give a pid, or --command, --user, --rank, --gpu, --job-id, " in result.stderr
    assert run_here(capsys, server.address, "trace", "--helpers").code == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--user", "ada", "--children"), "--children needs --pid, which names the parents"),
        (("--pid", "7", "--job-step", "0"), "--job-step needs --job-id, which names the job"),
    ],
)
def test_what_only_narrows_another_condition_needs_it(
    server: FakeServer, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    result = run_here(capsys, server.address, "trace", *arguments)
    assert result.code == 2
    assert problem in result.stderr


def _interrupt_after(process: subprocess.Popen[str], line: str, number: int = signal.SIGINT) -> str:
    """Wait for the line on stderr, then press Ctrl-C, or send another signal."""
    assert process.stderr is not None
    seen = ""
    while line not in seen:
        text = process.stderr.readline()
        assert text, seen
        seen += text
    process.send_signal(number)
    return seen


def _start(server: FakeServer, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        kinetoctl("--address", server.address, "trace", "--pid", "4242"),
        env=environment(PYTHONWARNINGS=""),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_anything_was_recorded_waits_for_the_daemon(
    server: FakeServer, tmp_path: Path, number: int
) -> None:
    cancelled = captures.target(state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_CANCELLED)
    running = captures.snapshot(captures.capture(captures.target(state=pb.TARGET_STATE_COLLECT)))
    server.profiler.watches = [[running, WAIT_FOR_CANCEL, ended(cancelled, status=pb.CAPTURE_STATUS_CANCELLED)]]
    server.profiler.cancelled = captures.capture(captures.target(state=pb.TARGET_STATE_PROCESS))
    with _start(server, tmp_path) as process:
        _interrupt_after(process, "COLLECT", number)
        stdout, stderr = process.communicate(timeout=scaled(30))
    assert process.returncode == 130
    assert "stopping capture c0ffee in 1 process and keeping what was recorded" in stderr
    assert "capture c0ffee was stopped before anything was recorded" in stderr
    assert "CANCELLED" in stdout
    asked = [r for r in server.profiler.requests if isinstance(r, pb.CancelCaptureRequest)]
    assert [(request.id, request.keep_partial) for request in asked] == [("c0ffee", True)]
    assert list(tmp_path.iterdir()) == []


def test_a_second_ctrl_c_leaves_at_once(server: FakeServer, tmp_path: Path) -> None:
    running = captures.snapshot(captures.capture(captures.target(state=pb.TARGET_STATE_COLLECT)))
    server.profiler.watches = [[running, WAIT_FOR_CANCEL], [Abort(grpc.StatusCode.UNAVAILABLE)]]
    server.profiler.stored = captures.capture(captures.target(state=pb.TARGET_STATE_PROCESS))
    server.profiler.cancelled = server.profiler.stored
    with _start(server, tmp_path) as process:
        _interrupt_after(process, "COLLECT")
        _interrupt_after(process, "PROCESS")
        _stdout, stderr = process.communicate(timeout=scaled(30))
    assert process.returncode == 130
    assert stderr.splitlines()[-2:] == [
        "`kinetoctl captures fetch c0ffee` downloads the files that the daemon keeps",
        "interrupted: stopped at once",
    ]


def test_ctrl_c_when_all_processes_have_ended_stops_nothing(server: FakeServer, tmp_path: Path) -> None:
    running, done = captures.snapshot(captures.capture()), captures.done_target()
    server.profiler.watches = [[running, captures.change(done), WAIT_FOR_CANCEL], [ended(done)]]
    with _start(server, tmp_path) as process:
        _interrupt_after(process, "DONE")
        _stdout, stderr = process.communicate(timeout=scaled(30))
    assert (process.returncode, stderr) == (
        130,
        "capture c0ffee has already ended; press Ctrl-C again to exit at once\n",
    )
    assert not [r for r in server.profiler.requests if isinstance(r, pb.CancelCaptureRequest)]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_reader_that_closes_stdout_is_no_error_of_kinetoctl(server: FakeServer, tmp_path: Path) -> None:
    server.profiler.watches = [[captures.snapshot(captures.capture()), ended(captures.done_target())]]
    with _start(server, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(scaled(30))
    assert process.returncode == 141


def test_an_encoding_without_the_characters_of_a_result_is_no_error(server: FakeServer, tmp_path: Path) -> None:
    server.profiler.watches = [[captures.snapshot(captures.capture()), ended(captures.done_target())]]
    arguments = ["--address", server.address, "trace", "--pid", "4242"]
    result = run_process(arguments, environment(PYTHONIOENCODING="ascii:strict"), tmp_path)
    assert (result.code, "SHA-256 verified" in result.stdout) == (0, True), result.stderr


def test_a_name_in_the_place_of_a_pid_is_answered_with_the_option_for_names(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_here(capsys, server.address, "trace", "train.py")
    assert (result.code, result.stderr.splitlines()[0]) == (
        2,
        "error: PID: expected a process id, got 'train.py'; use --command to select by command line",
    )


@pytest.mark.parametrize("words", [["4242"], ["--pid", "4242"], ["4242", "--pid", "4242"]])
def test_a_pid_is_an_argument_or_an_option(trace: Trace, words: list[str]) -> None:
    trace(*words, "--duration", "2")
    assert list(trace.spec().selector.pids) == [4242]
    assert trace.spec().duration_ns == 2 * 10**9  # a number without a unit is in seconds


def test_the_help_has_what_is_used_most_and_all_of_it_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (run_here(capsys, "unix:/nowhere", "trace", option).stdout for option in ("--help", "--help-all"))
    usual, every = (set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) for text in (short, whole))
    assert {"--duration", "--hosts", "--with-stack", "--help-all"} <= usual < every
    assert len(usual) <= 16
    assert "`kinetoctl trace --help-all` shows all" in short
    assert run_here(capsys, "unix:/nowhere", "trace", "--help").stdout == short


@pytest.fixture
def full_disk() -> Iterator[Path]:
    """A file system too small for the trace."""
    with small_disk("size=128k") as folder:
        yield folder


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_a_full_output_folder_is_an_error_that_says_what_to_do_and_nothing_half_written_stays(
    server: FakeServer, full_disk: Path, capsys: pytest.CaptureFixture[str], quiet: tuple[str, ...]
) -> None:
    server.profiler.watches = [[*happy_script()]]
    result = Trace(server, full_disk, capsys)(*quiet)
    assert (result.code, list(full_disk.iterdir())) == (5, [])
    assert result.stderr.splitlines()[-2:] == [
        f"error: pid 4242, rank 0: the disk of {full_disk} is full: {NAME} needs 300 KiB, 128 KiB are free; free up "
        "space there or choose another --output-dir",
        "The trace is still in the daemon's store; `kinetoctl captures fetch ID` downloads it again.",
    ]
    assert result.stdout.splitlines()[0] == "capture c0ffee on gpu-7: DONE, but not downloaded"
    assert "in the daemon's store: `kinetoctl captures fetch c0ffee`" in result.stdout


@pytest.mark.parametrize("ours", [True, False])
def test_roots_command_is_told_whoever_started_the_users_daemon(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr("kinetoctl.commands.trace.has_only_our_rights", lambda _client: ours)
    refused = captures.target(
        state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_FAILED, reason_code="ATTACH_NOT_PERMITTED"
    )
    trace.profiler.watches = [[ended(refused, status=pb.CAPTURE_STATUS_FAILED)]]
    assert ("Root can trace it: sudo " in trace().stderr) == ours
