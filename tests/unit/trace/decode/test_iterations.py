"""Iterations as "ProfilerStep#N" annotations."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from kineto_trace.decode import iterations
from kineto_trace.decode.activity_names import ACTIVITY_BUFFER_REQUEST
from kineto_trace.decode.iterations import (
    INCOMPLETE,
    apply_window,
    drop_trailing_requests,
    reported_marks,
    whole_extent,
)
from kineto_trace.model.trace import NO_ROW, StringTable, Table
from support.counters.trace_samples import sample
from support.trace_files.traces import START_NS, table, target

THREAD = 77
KERNELS = [
    {"start": 0, "duration": 10, "correlation": 1},
    {"start": 5, "duration": 10, "correlation": 2},
    {"start": 30, "duration": 10, "correlation": 3},
    {"start": 40, "duration": 10, "correlation": 4},
]
CALLS = [{"start": time, "duration": 1, "correlation": number} for number, time in ((1, 0), (2, 3), (3, 20), (4, 25))]
OPS = [
    {"start": 1, "duration": 9, "thread": 7, "id": 1},  # a kept launch begins in it
    {"start": 2, "duration": 3, "thread": 8, "id": 2},  # of another thread
    {"start": 5, "duration": 3, "thread": 7, "id": 3},  # after that launch
    {"start": 14, "duration": 90, "thread": 7, "id": 4},
]


def info(starts: Sequence[tuple[int, int]], *, end: int = 1000, thread: int = THREAD, **changes: Any) -> Any:
    """Iterations by number and start relative to START_NS; the window is [0, end)."""
    return target(
        window_start_ns=START_NS,
        window_end_ns=START_NS + end,
        iterations=[[number, START_NS + at] for number, at in starts],
        iteration_thread=thread,
        **changes,
    )


def add_iterations(tables: Mapping[str, Table], strings: StringTable, known: Any) -> dict[str, Table]:
    window = known.window_start_ns, known.window_end_ns
    return iterations.add_iterations(tables, strings, reported_marks(known), window)


def incomplete(starts: Sequence[tuple[int, int]]) -> list[str]:
    """The names of the iterations that are said to be incomplete."""
    strings = StringTable()
    found = add_iterations({}, strings, info(starts))["user_annotation"]
    return [
        strings.strings[name]
        for name, text in zip(found["name"].tolist(), found["inputs"].tolist(), strict=True)
        if text >= 0 and strings.strings[text] == INCOMPLETE
    ]


def rows(tables: dict[str, Table], strings: StringTable) -> list[tuple[str, int, int]]:
    """Name, start and end, relative to START_NS."""
    annotations = tables["user_annotation"]
    return [
        (strings.strings[name], int(start) - START_NS, int(end) - START_NS)
        for name, start, end in zip(annotations["name"], annotations["start"], annotations.end(), strict=True)
    ]


def added(starts: Sequence[tuple[int, int]], **changes: Any) -> list[tuple[str, int, int]]:
    strings = StringTable()
    return rows(add_iterations({}, strings, info(starts, **changes)), strings)


def op(name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start, "duration": end - start, "thread": THREAD, **more}


def test_an_iteration_is_complete_if_it_began_and_ended_in_the_window() -> None:
    assert incomplete([(7, 0), (8, 400), (9, 1000)]) == []
    assert incomplete([(7, -1), (8, 400), (9, 900), (10, 1001)]) == ["ProfilerStep#7", "ProfilerStep#9"]
    assert incomplete([(7, 0)]) == ["ProfilerStep#7"]


def test_each_iteration_lasts_until_the_next_begins() -> None:
    assert added([(7, 0), (8, 400), (9, 1000)]) == [("ProfilerStep#7", 0, 400), ("ProfilerStep#8", 400, 1000)]


def test_what_lies_outside_the_window_is_cut_off() -> None:
    assert added([(7, -50), (8, 400), (9, 1200)]) == [("ProfilerStep#7", 0, 400), ("ProfilerStep#8", 400, 1000)]


def test_an_iteration_that_had_not_ended_in_the_window_is_unfinished() -> None:
    tables = add_iterations({}, StringTable(), info([(7, 100), (8, 400)]))
    assert tables["user_annotation"]["finished"].tolist() == [1, 0]
    assert tables["user_annotation"].end().tolist() == [START_NS + 400, START_NS + 1000]


def test_iterations_outside_the_window_are_left_out() -> None:
    assert added([(5, -300), (6, -100), (7, 0), (8, 1000), (9, 1500)]) == [("ProfilerStep#7", 0, 1000)]


def test_a_row_has_the_thread_the_scope_and_an_id_of_its_own() -> None:
    strings = StringTable()
    tables = {
        "cpu_op": table("cpu_op", [op("aten::mm", 10, 20, id=4, torch_thread=3)], strings),
        "user_annotation": table("user_annotation", [op("forward", 5, 30, id=9)], strings),
    }
    result = add_iterations(tables, strings, info([(7, 0), (8, 400)]))["user_annotation"].take([1, 2])  # type: ignore[arg-type]
    assert result["id"].tolist() == [10, 11]
    assert result["thread"].tolist() == [THREAD] * 2
    assert result["torch_thread"].tolist() == [3, 3]
    assert result["scope"].tolist() == [7, 7]
    assert result["sequence"].tolist() == [-1, -1]
    assert [strings.strings[number] if number >= 0 else "" for number in result["inputs"]] == ["", INCOMPLETE]


@pytest.mark.parametrize("kind", ["user_annotation", "cpu_op"])
def test_steps_of_the_programs_own_profiler_are_kept_alone(kind: str) -> None:
    strings = StringTable()
    tables = {kind: table(kind, [op("ProfilerStep#3", 0, 900)], strings)}
    assert add_iterations(tables, strings, info([(7, 0), (8, 400)])) == tables


def test_steps_of_the_programs_own_profiler_that_the_window_cuts_are_incomplete() -> None:
    strings = StringTable()
    own = [op("ProfilerStep#3", -10, 90, inputs=-1), op("ProfilerStep#4", 90, 1000, inputs=-1)]
    tables = {"user_annotation": table("user_annotation", own, strings)}
    found = add_iterations(tables, strings, info([]))["user_annotation"]
    assert [strings.strings[number] if number >= 0 else "" for number in found["inputs"]] == [INCOMPLETE, ""]


def test_a_text_like_a_step_that_no_op_has_is_no_step() -> None:
    strings = StringTable()
    strings.add("ProfilerStep#3")
    assert len(add_iterations({}, strings, info([(7, 0)]))["user_annotation"]) == 1


@pytest.mark.parametrize(
    ("starts", "changes"),
    [([], {}), ([(7, 0)], {"thread": 0}), ([(7, 2000)], {}), ([(7, 0)], {"end": 0})],
)
def test_without_iterations_thread_or_window_nothing_is_added(
    starts: list[tuple[int, int]], changes: dict[str, int]
) -> None:
    assert add_iterations({}, StringTable(), info(starts, **changes)) == {}


def test_a_gap_in_the_numbers_is_not_bridged() -> None:
    assert added([(7, 0), (8, 100), (12, 500), (13, 900)]) == [
        ("ProfilerStep#7", 0, 100),
        ("ProfilerStep#12", 500, 900),
        ("ProfilerStep#13", 900, 1000),
    ]


@pytest.mark.parametrize(
    "entry", ["x", [1], [1, 2, 3], ["1", 2], [-1, START_NS + 1], [2**60, START_NS + 1], [5, 2**63]]
)
def test_entries_that_make_no_sense_are_skipped(entry: Any) -> None:
    strings = StringTable()
    wanted = info([(7, 0), (8, 400)])
    wanted.iterations.insert(1, entry)
    assert [name for name, _, _ in rows(add_iterations({}, strings, wanted), strings)] == [
        "ProfilerStep#7",
        "ProfilerStep#8",
    ]


def test_a_border_inside_an_optimizers_annotation_moves_to_its_end() -> None:
    strings = StringTable()
    optimizer = [op("Optimizer.step#SGD.step", start, start + 20) for start in (390, 990)]
    tables = {"user_annotation": table("user_annotation", optimizer, strings)}
    result = rows(add_iterations(tables, strings, info([(7, 0), (8, 405), (9, 1000)])), strings)
    assert result[2:] == [("ProfilerStep#7", 0, 410), ("ProfilerStep#8", 410, 1010)]


def test_the_outermost_op_across_a_border_counts() -> None:
    strings = StringTable()
    ops = [op("outer", 380, 450), op("inner", 390, 420)]
    tables = {"cpu_op": table("cpu_op", ops, strings)}
    result = rows(add_iterations(tables, strings, info([(7, 0), (8, 400), (9, 1000)])), strings)
    assert result == [("ProfilerStep#7", 0, 450), ("ProfilerStep#8", 450, 1000)]


def test_an_annotation_around_whole_iterations_moves_nothing() -> None:
    strings = StringTable()
    tables = {"user_annotation": table("user_annotation", [op("epoch", -500, 5000), op("fit", 0, 1000)], strings)}
    result = rows(add_iterations(tables, strings, info([(7, 0), (8, 400), (9, 1000)])), strings)
    assert result[2:] == [("ProfilerStep#7", 0, 400), ("ProfilerStep#8", 400, 1000)]


def test_an_op_of_another_thread_moves_nothing() -> None:
    strings = StringTable()
    tables = {"cpu_op": table("cpu_op", [{**op("aten::mm", 390, 410), "thread": 5}], strings)}
    result = rows(add_iterations(tables, strings, info([(7, 0), (8, 400), (9, 1000)])), strings)
    assert result == [("ProfilerStep#7", 0, 400), ("ProfilerStep#8", 400, 1000)]


def test_rows_nest_with_any_op() -> None:
    strings = StringTable()
    ops = [op(f"op{number}", number * 17, number * 17 + 13) for number in range(60)]
    tables = {"cpu_op": table("cpu_op", ops, strings)}
    starts = [(number, number * 100 + 7) for number in range(11)]
    steps = rows(add_iterations(tables, strings, info(starts, end=1003)), strings)
    assert len(steps) == 10
    for _, start, end in steps:
        for each in ops:
            first, last = each["start"], each["start"] + each["duration"]
            assert last <= start or first >= end or (start <= first and last <= end)


def test_steps_that_the_program_has_numbered_are_iterations_only_where_the_agent_has_counted_none() -> None:
    strings = StringTable()
    number = strings.add('"step_num":907')
    tables = {"user_annotation": table("user_annotation", [op("train", 10, 300), op("eval", 400, 500)], strings)}
    tables["user_annotation"].columns["inputs"][0] = number
    window = (START_NS, START_NS + 1000)
    assert iterations.has_counted(reported_marks(info([(7, 0), (8, 400)])), window)
    for marks in (reported_marks(info([])), reported_marks(info([(7, 2000)]))):
        assert not iterations.has_counted(marks, window)
        found = iterations.with_program_steps(tables, strings)
        assert found is not None
        assert rows(found, strings) == [("ProfilerStep#907", 10, 300), ("eval", 400, 500)]
        kept = iterations.add_iterations(found, strings, marks, window)
        assert rows(kept, strings) == rows(found, strings)
    assert iterations.with_program_steps({}, strings) is None


def test_keeps_what_overlaps_and_the_calls_that_caused_it() -> None:
    strings = StringTable()
    tables = {"kernel": table("kernel", KERNELS, strings), "cuda_runtime": table("cuda_runtime", CALLS, strings)}
    kept, outside = apply_window(tables, START_NS + 12, START_NS + 40)
    assert kept["kernel"]["correlation"].tolist() == [2, 3]
    assert kept["cuda_runtime"]["correlation"].tolist() == [2, 3, 4]
    assert outside == 3


def test_an_op_outside_stays_if_a_kept_launch_lies_in_it_and_tensors_stay_with_their_op() -> None:
    strings = StringTable()
    calls = [{**call, "thread": 7} for call in CALLS]
    tables = {
        "kernel": table("kernel", KERNELS, strings),
        "cuda_runtime": table("cuda_runtime", calls, strings),
        "cpu_op": table("cpu_op", OPS, strings),
        "op_tensor": table("op_tensor", [{"op": number} for number in (1, 2, 3, 4, 4)], strings),
    }
    kept, outside = apply_window(tables, START_NS + 12, START_NS + 40)
    assert kept["cpu_op"]["id"].tolist() == [1, 4]
    assert kept["op_tensor"]["op"].tolist() == [1, 4, 4]
    assert outside == 5


def test_parents_keep_their_meaning() -> None:
    calls = [
        {"start": 0, "duration": 5, "parent": NO_ROW},
        {"start": 10, "duration": 50, "parent": NO_ROW},
        {"start": 20, "duration": 9, "parent": 1},
    ]
    tables = {"python_function": table("python_function", calls, StringTable())}
    kept, _ = apply_window(tables, START_NS + 12, START_NS + 40)
    assert kept["python_function"]["parent"].tolist() == [NO_ROW, 0]


def test_a_whole_table_is_not_copied() -> None:
    tables = {"kernel": table("kernel", KERNELS, StringTable())}
    kept, outside = apply_window(tables, START_NS, START_NS + 100)
    assert kept["kernel"] is tables["kernel"]
    assert outside == 0


def test_records_without_a_time_are_outside() -> None:
    tables = {"kernel": table("kernel", [{"start": -START_NS}], StringTable())}
    assert apply_window(tables, 0, 2**62)[1] == 1


def test_the_extent_of_everything() -> None:
    strings = StringTable()
    tables = {"kernel": table("kernel", KERNELS, strings), "gpu_memset": table("gpu_memset", [], strings)}
    assert whole_extent(tables) == (START_NS, START_NS + 51)
    assert whole_extent({}) == (0, 0)


def test_only_the_trailing_buffer_request_goes() -> None:
    strings = StringTable()
    requests = [
        {"start": 1, "duration": 2, "kind": ACTIVITY_BUFFER_REQUEST},
        {"start": 60, "duration": 2, "kind": ACTIVITY_BUFFER_REQUEST},
        {"start": 61, "duration": 2, "kind": 1 << 16},
    ]
    tables = {"kernel": table("kernel", KERNELS, strings), "overhead": table("overhead", requests, strings)}
    kept = drop_trailing_requests(tables)["overhead"]
    assert (kept["start"] - START_NS).tolist() == [1, 61]


def test_samples_of_counters_neither_stretch_the_extent_nor_hide_the_trailing_request() -> None:
    strings = StringTable()
    tables = {
        "kernel": table("kernel", KERNELS, strings),
        "overhead": table("overhead", [{"start": 60, "duration": 2, "kind": ACTIVITY_BUFFER_REQUEST}], strings),
        "counter": table("counter", [sample(-100, 500, 1)], strings),
    }
    assert whole_extent({kind: tables[kind] for kind in ("kernel", "counter")}) == (START_NS, START_NS + 51)
    assert whole_extent({"counter": tables["counter"]}) == (0, 0)
    assert not len(drop_trailing_requests(tables)["overhead"])
