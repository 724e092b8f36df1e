"""What a capture looks like: the summary's lines, plain values, numbers for people."""

from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client import enum_names
from kinetoctl.client.retry import Patience
from kinetoctl.errors import Unreachable
from kinetoctl.output import units
from kinetoctl.output.capture_progress import LiveTable, show_progress, state_text
from kinetoctl.output.capture_summary import target_lines
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
        ("top Python", "  900 ms         90 samples  job/train.py(12): load_batch"),
        ("dropped", "cupti 7"),
        ("overhead", "start 12 ms, stop 1 ms, agent CPU 50 ms, step time \N{MULTIPLICATION SIGN}1.11"),
        ("delays", "20 ms from the request to the first record, 400 ms from the last to the stored file"),
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
        "stands still",
        f"a thread of process {target.pid} has been inside cuptiFinalize for 1 min 30 s (capture c0ffee): it "
        "waits until the GPU is idle, and the program's launches wait with it",
    )


def test_of_a_pace_that_changed_the_least_cost_is_told() -> None:
    target = full_target()
    target.overhead.CopyFrom(pb.Overhead(start_ns=12_000_000, least_step_ratio=1.094))
    (line,) = (text for label, text in target_lines(captures.capture(target), target, {}) if label == "overhead")
    assert line == "start 12 ms, step time \N{MULTIPLICATION SIGN}1.09 or more, as its pace changed"


def test_a_live_attach_is_told_with_what_it_took() -> None:
    target = full_target()
    target.attach.CopyFrom(pb.Attach(method="pending-call", latency_ns=3_100_000, stopped_ns=250_000))
    (line,) = (text for label, text in target_lines(captures.capture(target), target, {}) if label == "attach")
    assert line == "pending-call: in the process after 3.1 ms, a thread stopped for 250 µs"
    target.attach.CopyFrom(pb.Attach(method="pending-call", latency_ns=700_000))
    (line,) = (text for label, text in target_lines(captures.capture(target), target, {}) if label == "attach")
    assert line == "pending-call: in the process after 700 µs, no thread stopped"


def test_of_a_recording_by_libkineto_neither_cost_nor_losses_are_claimed() -> None:
    target = captures.done_target()
    target.recorder = pb.RECORDER_KINETO
    lines = target_lines(captures.capture(target), target, {})
    assert lines[0] == ("recorder", "the process's own libkineto, whose cost is not measured")
    assert ("dropped", "unknown: libkineto does not tell") in lines


def python_lines(target: pb.Target) -> list[tuple[str, str]]:
    lines = target_lines(captures.capture(target), target, {})
    first = next(place for place, (label, _) in enumerate(lines) if label == "top Python")
    return lines[first : next(place for place, (label, _) in enumerate(lines) if label == "dropped")]


def test_python_functions_are_told_with_their_hottest_lines_and_threads_with_what_they_did() -> None:
    target = full_target()
    del target.summary.top_functions[:]
    lines = [pb.LineStat(line=57, count=61), pb.LineStat(line=63, count=20)]
    target.summary.top_functions.add(
        name="/srv/job/train.py(12): run", count=100, total_ns=1_000_000_000, lines=lines, waiting=7
    )
    target.summary.top_functions.add(
        name="a.py(1): f", count=1, total_ns=10_000_000, lines=[pb.LineStat(line=2, count=1)]
    )
    target.summary.python_samples.CopyFrom(pb.SampleStates(running=101, waiting=7, idle=303))
    target.summary.native_threads.add(thread=77, name="pt_autograd_0", cpu_ns=1_200_000_000, cpu_fraction=0.4)
    assert python_lines(target) == [
        (
            "top Python",
            "     1 s        100 samples  job/train.py(12): run · lines 57 (61%), 63 (20%)"
            " · 7 more waiting for the GIL",
        ),
        ("", "   10 ms          1 samples  a.py(1): f · line 2"),
        ("threads", "of 411 samples 25% running, 2% waiting for the GIL, 74% idle"),
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
        ("", "`kinetoctl explain AGENT_SILENT` says what to do"),
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


def test_a_long_kernel_name_keeps_both_ends() -> None:
    assert units.shortened("void cutlass::gemm<float, 128>(Params)", 20) == "void cutlass…Params)"


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
