"""A part of a trace has what overlaps it, with the launches, operators and arrows that belong to it."""

import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.conversion.time_cut import cut, longest, with_margin
from kineto_trace.errors import TraceError
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from support.trace_files import synthetic
from support.trace_files.traces import START_NS, trace


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
    with pytest.raises(TraceError, match="ends after it begins"):
        cut(made(), START_NS + 5, START_NS + 5)


def test_the_longest_activity_of_a_name_is_found() -> None:
    assert longest(made(), "b") == (START_NS + 700, START_NS + 750)
    with pytest.raises(TraceError, match="no activity of the trace is called 'c'"):
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
