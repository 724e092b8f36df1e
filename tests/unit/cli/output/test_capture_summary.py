"""What a capture looks like: the summary's lines, plain values, numbers for people."""

from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Patience
from kinetoctl.client.fleet.host_run import Fleet, HostRun, Offset
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import CliError, Denied, DownloadFailed, NotFound, Unreachable
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import units
from kinetoctl.output.capture_progress import LiveTable, show_progress, state_text
from kinetoctl.output.capture_summary import fleet_document, notes, ranks_text, rows, show_fleet_result, target_lines
from kinetoctl.output.console import plain
from rich.console import Console
from rich.live import Live
from support.service import captures


def full_target() -> pb.Target:
    target = captures.done_target()
    target.summary.activities.update({"kernel": 245_000, "gpu_memcpy": 1_200, "python_function": 300})
    target.summary.gpu_busy_fraction = 0.934
    target.summary.top_kernels.add(name="gemm", count=12_000, total_ns=1_230_000_000)
    target.summary.top_kernels.add(name="relu", count=800, total_ns=95_000)
    target.summary.top_ops.add(name="aten::addmm", count=9_000, total_ns=640_000_000)
    target.summary.top_functions.add(name="/home/ada/job/train.py(12): load_batch", count=90, total_ns=900_000_000)
    target.summary.window_start_ns = captures.START_NS
    target.summary.iterations, target.summary.first_iteration = 5, 1000
    target.summary.window_end_ns = captures.START_NS + 3_000_000_000
    target.counts.add(source="cupti", records=246_200, bytes=40 << 20, dropped=7)
    target.overhead.CopyFrom(
        pb.Overhead(start_ns=12_000_000, stop_ns=1_000_000, agent_cpu_ns=50_000_000, step_ratio=1.114)
    )
    target.requested_ns, target.collecting_ns = captures.START_NS - 20_000_000, captures.START_NS
    target.collected_ns, target.stored_ns = captures.START_NS + 3_000_000_000, captures.START_NS + 3_400_000_000
    target.warnings.append("stayed attached: torch's profiler holds CUPTI")
    return target


def test_the_summary_tells_file_content_losses_cost_and_how_to_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "moment", lambda _ns: "2030-01-31 12:00:00")
    target = full_target()
    assert target_lines(captures.capture(target), target, {"chrome": Path("t.json.gz")}) == [
        ("file", "t.json.gz (300.0 KiB, SHA-256 verified)"),
        ("window", "3 s from 2030-01-31 12:00:00"),
        ("iterations", "1000-1004"),
        ("holds", "245,000 kernel, 1,200 gpu_memcpy, 300 python_function"),
        ("GPU busy", "93.4% of the window"),
        ("top ops", "  640 ms      9,000 \N{MULTIPLICATION SIGN}  aten::addmm"),
        ("top kernels", "  1.23 s     12,000 \N{MULTIPLICATION SIGN}  gemm"),
        ("", "   95 µs        800 \N{MULTIPLICATION SIGN}  relu"),
        ("top Python", "  900 ms         90 samples  train.py(12): load_batch"),
        ("dropped", "cupti 7"),
        ("overhead", "start 12 ms, stop 1 ms, agent CPU 50 ms, step time \N{MULTIPLICATION SIGN}1.11"),
        ("delays", "20 ms from the request to the first record, 400 ms from the last record to the stored file"),
        ("warning", "stayed attached: torch's profiler holds CUPTI"),
        ("analyse", "kinetoctl report t.json.gz"),
        ("open with", "kinetoctl open, or https://ui.perfetto.dev or chrome://tracing (drop the file there)"),
        ("", 'or HTA: TraceAnalysis(trace_files={0: "t.json.gz"})'),
    ]


def test_a_program_that_stands_in_a_call_of_ours_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: captures.START_NS + 90_000_000_000)
    target = full_target()
    target.standing.CopyFrom(pb.StandingCall(call="cuptiFinalize", since_ns=captures.START_NS, capture_id="c0ffee"))
    assert target_lines(pb.Capture(id="c0ffee"), target, {})[0] == (
        "no progress",
        f"a thread of process {target.pid} has been inside cuptiFinalize for 1 min 30 s (capture c0ffee): it "
        "is waiting for the GPU to become idle, and the program's launches wait with it",
    )


def test_of_a_pace_that_changed_the_least_cost_is_told() -> None:
    target = full_target()
    target.overhead.CopyFrom(pb.Overhead(start_ns=12_000_000, least_step_ratio=1.094))
    (line,) = (text for label, text in target_lines(captures.capture(target), target, {}) if label == "overhead")
    assert line == "start 12 ms, step time \N{MULTIPLICATION SIGN}1.09 or more (the program's own pace changed)"


def test_a_live_attach_is_told_with_what_it_took() -> None:
    target = full_target()
    target.attach.CopyFrom(pb.Attach(method="pending-call", latency_ns=3_100_000, stopped_ns=250_000))
    (line,) = (text for label, text in target_lines(captures.capture(target), target, {}) if label == "attach")
    assert line == "pending-call: took 3.1 ms, a thread stopped for 250 µs"
    target.attach.CopyFrom(pb.Attach(method="pending-call", latency_ns=700_000))
    (line,) = (text for label, text in target_lines(captures.capture(target), target, {}) if label == "attach")
    assert line == "pending-call: took 700 µs, no thread stopped"


def test_of_a_recording_by_libkineto_neither_cost_nor_losses_are_claimed() -> None:
    target = captures.done_target()
    target.recorder = pb.RECORDER_KINETO
    lines = target_lines(captures.capture(target), target, {})
    assert lines[0] == ("recorder", "the process's own libkineto (overhead not measured)")
    assert ("dropped", "unknown: libkineto does not report it") in lines


def python_lines(target: pb.Target) -> list[tuple[str, str]]:
    lines = target_lines(captures.capture(target), target, {})
    first = next(place for place, (label, _) in enumerate(lines) if label == "top Python")
    return lines[first : next(place for place, (label, _) in enumerate(lines) if label == "dropped")]


def test_python_functions_are_told_with_their_hottest_lines_and_threads_with_what_they_did() -> None:
    target = full_target()
    del target.summary.top_functions[:]
    lines = [pb.LineStat(line=57, count=61), pb.LineStat(line=63, count=20)]
    target.summary.top_functions.add(
        name="/srv/env/lib/python3.12/site-packages/torch/nn/modules/linear.py(12): run",
        count=100,
        total_ns=1_000_000_000,
        lines=lines,
        waiting=7,
    )
    target.summary.top_functions.add(
        name="a.py(1): f", count=1, total_ns=10_000_000, lines=[pb.LineStat(line=2, count=1)]
    )
    target.summary.python_samples.CopyFrom(pb.SampleStates(running=101, waiting=7, idle=303))
    target.summary.native_threads.add(thread=77, name="pt_autograd_0", cpu_ns=1_200_000_000, cpu_fraction=0.4)
    assert python_lines(target) == [
        (
            "top Python",
            "     1 s        100 samples  torch/nn/modules/linear.py(12): run · lines 57 (61%), 63 (20%)"
            " · 7 more waiting for the GIL",
        ),
        ("", "   10 ms          1 samples  a.py(1): f · line 2"),
        ("threads", "of 411 samples: 25% running, 2% waiting for the GIL, 74% idle"),
        ("no Python", "   1.2 s       40.0% of a core  pt_autograd_0 (thread 77)"),
    ]


def test_the_way_in_which_operators_were_recorded_is_told() -> None:
    target = full_target()
    target.counts.add(source="torch_ops", records=9, way="observer, torch 2.13.0")
    target.counts.add(source="plugin", records=9, way="its own")
    lines = target_lines(captures.capture(target), target, {})
    assert ("ops by", "observer, torch 2.13.0") in lines
    assert ("plugin", "its own") in lines
    assert plain(target)["counts"][1]["way"] == "observer, torch 2.13.0"


def test_a_target_without_a_trace_has_only_its_reason() -> None:
    target = captures.target(verdict=pb.VERDICT_FAILED, reason_code="AGENT_SILENT", reason="no answer")
    assert target_lines(captures.capture(target), target, {}) == [
        ("reason", "no answer [AGENT_SILENT]"),
        ("", "run `kinetoctl explain AGENT_SILENT` for advice"),
    ]


def test_no_gpu_is_not_an_idle_gpu() -> None:
    target = full_target()
    target.summary.gpu_busy_fraction = -1
    assert "GPU busy" not in [label for label, _ in target_lines(captures.capture(target), target, {})]


def test_plain_values_keep_names_integers_and_absence() -> None:
    document = plain(pb.CaptureSpec(selector=pb.Selector(pids=[1]), labels={"b": "2", "a": "1"}, duration_ns=1 << 60))
    assert (
        document["selector"] | {"pids": [1], "command_regex": "", "ranks": [], "helpers": False} == document["selector"]
    )
    assert document["duration_ns"] == 1 << 60
    assert document["iterations"] is None
    assert document["options"] is None
    assert list(document["labels"].items()) == [("a", "1"), ("b", "2")]


def test_an_enum_value_of_a_newer_daemon_is_its_number() -> None:
    assert enum_names.verdict(99) == "99"  # that is the point
    assert plain(pb.Target(verdict=99))["verdict"] == 99  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "expected"), [(17, "17 B"), (3_250_586, "3.1 MiB"), (141 << 30, "141.0 GiB")])
def test_sizes_in_a_column_have_one_decimal(value: int, expected: str) -> None:
    assert units.size(value) == expected


def test_kernels_with_long_names_that_differ_in_their_middle_are_told_apart() -> None:
    target = full_target()
    for functor in ("AddFunctor", "MulFunctor"):
        name = f"void at::native::vectorized_elementwise_kernel<4, {'x' * 40}{functor}<float>, {'y' * 80}>(int)"
        target.summary.top_kernels.add(name=name, count=1, total_ns=1)
    texts = [
        text for _, text in target_lines(captures.capture(target), target, {}) if "vectorized" in text or "void" in text
    ]
    assert [("AddFunctor" in text, "MulFunctor" in text) for text in texts] == [(True, False), (False, True)]


def test_the_live_table_shows_state_counts_and_the_download() -> None:
    console = Console(width=120, force_terminal=False)
    table = LiveTable(Live(console=console))
    target = full_target()
    table.update(captures.capture(target, captures.target(4343, state=pb.TARGET_STATE_COLLECT)))
    table.fetching(target, 153_600, target.files[0])
    with console.capture() as shown:
        console.print(table)
    lines = [line.split() for line in shown.get().splitlines()]
    assert lines[0] == ["TARGET", "STATE", "FOR", "RECORDS", "BYTES", "DROPPED"]
    assert " ".join(lines[1]) == "pid 4242, rank 0 DONE 3.0 s 246,200 40.0 MiB 7 fetched 50% of 300.0 KiB"
    assert lines[2][:5] == ["pid", "4343,", "rank", "0", "COLLECT"]


def test_progress_in_a_terminal_is_live(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with show_progress(quiet=False, color=False) as progress:
        progress.update(captures.capture())
        progress.note("a note")
    assert isinstance(progress, LiveTable)
    assert "a note" in capsys.readouterr().err


def test_the_state_of_an_ended_target_is_its_verdict_and_reason() -> None:
    ended = captures.target(state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_PARTIAL, reason_code="TARGET_EXITED")
    assert state_text(ended) == "PARTIAL TARGET_EXITED"
    cancelled = captures.target(state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_CANCELLED, reason_code="CANCELLED")
    assert state_text(cancelled) == "CANCELLED"


def test_patience_pauses_longer_each_time_and_ends_at_the_limit() -> None:
    now, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    patience = Patience(1.0, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(Unreachable):
        while True:
            patience.wait(Unreachable("gone"))
    assert pauses == [0.1, 0.2, 0.4]
    patience.progressed()
    patience.wait(Unreachable("gone"))
    assert pauses[-1] == 0.1


MS = 1_000_000
CLOCK = Offset(2 * MS, 300_000)
GONE = Unreachable("no daemon at n1:50051: gone")


def target(
    rank: int, verdict: pb.Verdict = pb.VERDICT_DONE, *, reason: str = "", begin_ns: int = 0, running: bool = False
) -> pb.Target:
    files = (captures.trace_file(),) if verdict in (pb.VERDICT_DONE, pb.VERDICT_PARTIAL) else ()
    made = captures.target(
        4000 + rank,
        state=pb.TARGET_STATE_COLLECT if running else pb.TARGET_STATE_ENDED,
        verdict=pb.VERDICT_UNSPECIFIED if running else verdict,
        reason=reason,
        files=files,
    )
    made.process.rank = rank
    made.summary.window_start_ns = begin_ns
    return made


def member(host: str, *targets: pb.Target, error: CliError | None = None) -> HostRun:
    capture = captures.capture(*targets, status=pb.CAPTURE_STATUS_DONE) if targets else None
    return HostRun(Place(host, f"{host}:50051"), capture, error=error, clock=CLOCK if targets else None)


def fleet(*members: HostRun, ranks: frozenset[int] = frozenset()) -> Fleet:
    return Fleet(id="f1", members=list(members), ranks=ranks)


def code(*members: HostRun, ranks: frozenset[int] = frozenset()) -> ExitCode:
    return fleet(*members, ranks=ranks).exit_code()


def test_0_is_only_for_everything() -> None:
    whole = member("n0", target(0), target(1))
    assert code(whole, member("n1", target(2))) == ExitCode.DONE
    assert code(whole, member("n1", target(2, pb.VERDICT_PARTIAL))) == ExitCode.PARTIAL
    assert code(whole, member("n1", target(2, pb.VERDICT_FAILED))) == ExitCode.PARTIAL
    assert code(whole, member("n1", error=GONE)) == ExitCode.PARTIAL


def test_a_process_whose_host_is_lost_is_never_done() -> None:
    lost = member("n1", target(2, running=True), error=GONE)
    assert code(member("n0", target(0)), lost) == ExitCode.PARTIAL
    assert code(lost) == ExitCode.FAILED
    (row,) = rows(fleet(lost))
    assert row[:4] == ("n1", "2", "4002", "UNKNOWN")
    assert row[-1] == "no daemon at n1:50051: gone [HOST_LOST]"


@pytest.mark.parametrize(
    ("error", "expected"),
    [(GONE, ExitCode.UNREACHABLE), (Denied("no"), ExitCode.DENIED), (NotFound("none"), ExitCode.NOT_FOUND)],
)
def test_if_all_hosts_fail_alike_the_code_is_that_of_their_error(error: CliError, expected: ExitCode) -> None:
    assert code(member("n0", error=error), member("n1", error=error)) == expected


def test_if_they_fail_differently_it_is_failed() -> None:
    assert code(member("n0", error=GONE), member("n1", error=Denied("no"))) == ExitCode.FAILED
    assert code(member("n0", target(0, pb.VERDICT_FAILED))) == ExitCode.FAILED


def test_what_was_not_begun_is_failed_though_its_parts_were_cancelled() -> None:
    cancelled = fleet(member("n0", target(0, pb.VERDICT_CANCELLED)))
    assert cancelled.exit_code() == ExitCode.CANCELLED
    cancelled.unmet = "only 1 of 2 hosts are ready"
    assert cancelled.exit_code() == ExitCode.FAILED


def test_with_ranks_a_host_without_them_is_no_failure_but_a_rank_that_nobody_has_is() -> None:
    members = member("n0", target(0)), member("n1", error=NotFound("no process matches"))
    assert code(*members, ranks=frozenset({0})) == ExitCode.DONE
    assert code(*members, ranks=frozenset({0, 5, 6})) == ExitCode.PARTIAL
    assert "no host has rank 5-6" in list(notes(fleet(*members, ranks=frozenset({0, 5, 6}))))
    assert code(*members) == ExitCode.PARTIAL


def test_files_that_are_not_here_are_partial_or_failed() -> None:
    first, second = member("n0", target(0)), member("n1", target(1))
    second.problems.append(DownloadFailed("disk full"))
    assert code(first, second) == ExitCode.FAILED
    first.paths[4000, 4000, "chrome"] = Path("trace.json.gz")
    assert code(first, second) == ExitCode.PARTIAL


def test_an_interrupted_capture_is_130_whatever_came_of_it() -> None:
    stopped = fleet(member("n0", target(0)))
    stopped.interrupted = True
    assert stopped.exit_code() == ExitCode.INTERRUPTED


def test_each_process_has_a_row_with_its_verdict_and_reason() -> None:
    found = fleet(
        member("n0", target(0), target(1, pb.VERDICT_FAILED, reason="it exited")),
        member("n1", error=Denied("not yours", reason_code="PERMISSION_DENIED")),
    )
    assert list(rows(found)) == [
        ("n0", "0", "4000", "DONE", "0", "+2 ms ±300 µs", ""),
        ("n0", "1", "4001", "FAILED", "0", "+2 ms ±300 µs", "it exited"),
        ("n1", "-", "-", "FAILED", "-", "-", "not yours [PERMISSION_DENIED]"),
    ]


def test_below_the_rows_each_reason_code_is_named_once_with_the_command_that_explains_it() -> None:
    dropped = [target(rank, pb.VERDICT_PARTIAL, reason="full") for rank in (0, 1)]
    for each in dropped:
        each.reason_code = "RECORDS_DROPPED"
    refused = member("n1", error=Denied("no", reason_code="NO_ROLE"))
    without = member("n2", error=NotFound("no process matches", reason_code="NO_MATCH"))
    assert list(notes(fleet(member("n0", *dropped), refused, without, ranks=frozenset({0, 1})))) == [
        "run `kinetoctl explain NO_ROLE` for advice",
        "run `kinetoctl explain RECORDS_DROPPED` for advice",
    ]


def test_of_many_processes_those_of_a_host_that_are_all_done_share_a_row() -> None:
    many = member("n0", *(target(rank) for rank in range(64)))
    found = fleet(many, member("n1", target(64), target(65, pb.VERDICT_PARTIAL, reason="lost records")))
    assert [row[:4] for row in rows(found)] == [
        ("n0", "0-63", "64 processes", "DONE"), ("n1", "64", "4064", "DONE"), ("n1", "65", "4065", "PARTIAL"),
    ]  # fmt: skip


def test_a_window_that_began_elsewhere_is_told() -> None:
    start_ns = captures.START_NS
    late = member("n0", target(0, begin_ns=start_ns - 2 * MS), target(1, begin_ns=start_ns + 40 * MS))
    found = fleet(late)
    found.start_ns = start_ns
    assert [row[-1] for row in rows(found)] == ["", "started 42 ms after the common start"]
    assert list(notes(found)) == ["the windows start within 42 ms of each other, with a clock uncertainty of ±300 µs"]


def test_the_document_says_everything() -> None:
    found = fleet(member("n0", target(0)), member("n1", target(1, running=True), error=GONE))
    document = fleet_document(found)
    assert (document["id"], document["exit_code"], document["merged"]) == ("f1", 4, None)
    first, second = document["hosts"]
    assert first["clock"] == {"offset_ns": 2 * MS, "uncertainty_ns": 300_000}
    assert first["capture"]["targets"][0]["files"][0]["path"] is None
    assert (second["error"], second["lost_pids"]) == (str(GONE), [4001])


def test_the_verdict_on_a_job_stands_before_its_table_and_in_its_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = fleet(member("n0", target(0)))
    found.answer.verdict = "A step takes 51 ms on average on each of 4 ranks."
    show_fleet_result(
        found, None, None, CommonOptions(address="", output="table", color=False, quiet=True, timeout_s=1)
    )
    assert capsys.readouterr().out.splitlines()[0] == found.answer.verdict
    assert fleet_document(found)["answer"] == {"verdict": found.answer.verdict, "cause": ""}


def test_ranks_are_written_as_ranges() -> None:
    assert [ranks_text([3]), ranks_text([9, 0, 1, 2]), ranks_text([4, 5])] == ["3", "0-2,9", "4-5"]


@pytest.mark.parametrize("output", ["table", "json"])
def test_quiet_still_says_which_files_are_missing_and_what_to_do(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = member("n0", target(0))
    one.problems.append(DownloadFailed("the disk of /traces is full").about("n0 pid 4000, rank 0"))
    settings = CommonOptions(address="", output=output, color=False, quiet=True, timeout_s=1.0)
    show_fleet_result(fleet(one), tmp_path, None, settings)
    assert capsys.readouterr().err.splitlines() == [
        "error: n0 pid 4000, rank 0: the disk of /traces is full",
        "The trace is still in the daemon's store; `kinetoctl captures fetch ID` downloads it again.",
    ]
