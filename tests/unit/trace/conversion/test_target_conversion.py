import gzip
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.arrays.intervals import covered
from kineto_trace.conversion.target_conversion import convert_target, launch_warnings, summarize
from kineto_trace.conversion.worker_job import answer
from kineto_trace.errors import FormatError, SpoolError, UnknownVersionError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file
from kineto_trace.store.output_formats import SUFFIXES
from kineto_trace.store.parquet_folder import load_columns
from support.agent.stack_records import UNKNOWN, Sample, write_recording
from support.agent.stack_records import recording as recording_of
from support.counters.trace_samples import sample
from support.peers.on_demand_kineto import trace_text
from support.small_disk import fill, small_disk
from support.trace_files.h200 import make_spool, recording
from support.trace_files.traces import START_NS, trace


def add_stacks(target_dir: Path, samples: list[tuple[int, int, int]], format: str = "python_stacks/1") -> None:
    source = recording_of(
        [Sample(*sample, state=UNKNOWN) for sample in samples],
        codes={1: b"train.py\x0012\x00main"},
        nodes={1: struct.pack("<II", 0, 1)},
        threads={9: b"loader"},
        format=format,
        dropped=4,
    )
    write_recording(target_dir, source)


def test_writes_the_wanted_files_and_the_columns(tmp_path: Path) -> None:
    conversion = convert_target(make_spool(tmp_path, "mlp-cupti26"), formats=["chrome", "chrome-json", "chrome"])
    assert [(file.format, file.name) for file in conversion.files] == [
        ("chrome", "trace.json.gz"),
        ("chrome-json", "trace.json"),
    ]
    for file in conversion.files:
        data = (tmp_path / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size_bytes, file.sha256)
    packed = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert packed["traceEvents"] == json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(load_columns(tmp_path / "columns").table("kernel")) == 310
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "columns",
        "raw",
        "target.json",
        "trace.json",
        "trace.json.gz",
    ]


def test_no_format_gives_the_default_one(tmp_path: Path) -> None:
    conversion = convert_target(make_spool(tmp_path, "graph-cupti26"), formats=[])
    assert [file.format for file in conversion.files] == ["chrome"]


def test_the_summary_of_a_recording(tmp_path: Path) -> None:
    conversion = convert_target(make_spool(tmp_path, "streams-cupti130001"), formats=[])
    assert conversion.summary["activities"] == {
        "gpu_memcpy": 50,
        "kernel": 130,
        "cuda_driver": 470,
        "cuda_runtime": 1720,
        "overhead": 1,
        "cuda_sync": 20,
    }
    assert 0.3 < conversion.summary["gpu_busy_fraction"] < 0.6
    assert [entry["count"] for entry in conversion.summary["top_kernels"]] == [40, 40, 40, 10]
    assert (conversion.warnings, conversion.records_dropped, conversion.records_undecoded) == ((), 0, 0)


def test_a_narrow_window_leaves_the_rest_out(tmp_path: Path) -> None:
    start, end = recording("mlp-cupti26").window
    middle = (start + end) // 2
    conversion = convert_target(make_spool(tmp_path, "mlp-cupti26", window_end_ns=middle), formats=[])
    kept = sum(conversion.summary["activities"].values())
    assert conversion.summary["out_of_window"] + kept == recording("mlp-cupti26").info["records"]
    assert 0 < conversion.summary["activities"]["kernel"] < 310


def test_without_a_window_everything_is_kept(tmp_path: Path) -> None:
    target_dir = make_spool(tmp_path, "mlp-cupti26", window_start_ns=0, window_end_ns=0, complete=False)
    conversion = convert_target(target_dir, formats=[])
    assert conversion.summary["activities"]["kernel"] == 310
    start, end = recording("mlp-cupti26").window
    assert abs(conversion.summary["window_start_ns"] - start) < 1e9
    assert conversion.summary["window_start_ns"] < conversion.summary["window_end_ns"] < end + 1e9


def test_sources_come_together_in_one_trace(tmp_path: Path) -> None:
    start, _ = recording("mlp-cupti26").window
    add_stacks(make_spool(tmp_path, "mlp-cupti26"), [(start, 9, 1), (start + 10_000_000, 9, 1)])
    conversion = convert_target(tmp_path, formats=["chrome-json"])
    assert conversion.summary["activities"]["python_function"] == 1
    assert conversion.summary["top_functions"] == [
        {"name": "train.py(12): main", "count": 2, "total_ns": 20_000_000, "waiting": 0, "lines": []}
    ]
    assert conversion.records_dropped == 4
    names = [row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["ph"] == "M"]
    assert any(row["args"].get("name") == "thread 9 (loader)" for row in names)


def test_a_target_without_sources_gives_an_empty_trace(tmp_path: Path) -> None:
    make_spool(tmp_path, "mlp-cupti26")
    for path in (tmp_path / "raw" / "cupti").iterdir():
        path.unlink()
    (tmp_path / "raw" / "cupti").rmdir()
    conversion = convert_target(tmp_path, formats=["chrome-json"])
    assert conversion.summary["activities"] == {}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"][-1]["name"] == "Record Window End"


def test_records_of_an_unknown_format_are_left_out_with_a_warning(tmp_path: Path) -> None:
    add_stacks(make_spool(tmp_path, "mlp-cupti26"), [(1, 9, 1)], format="python_stacks/99")
    conversion = convert_target(tmp_path, formats=[])
    assert conversion.warnings[0] == ("python_stacks: records in the unknown format 'python_stacks/99' are left out")
    assert conversion.records_undecoded == 1


def test_absurd_device_properties_do_not_spoil_the_file(tmp_path: Path) -> None:
    devices = [{"id": 0, "name": "X", "numSms": float("nan")}, {"id": "zero"}, "none", {"id": 1, "deep": [1]}]
    make_spool(tmp_path, "mlp-cupti26", metadata={"cupti_version": 26, "devices": devices})
    convert_target(tmp_path, formats=["chrome-json"])
    parsed = json.loads((tmp_path / "trace.json").read_text())
    assert parsed["deviceProperties"] == [{"id": 0, "name": "X"}, {"id": 1}]
    kernel = next(row for row in parsed["traceEvents"] if row.get("cat") == "kernel")
    assert "est. achieved occupancy %" not in kernel["args"]


def test_what_a_crash_cut_off_is_said(tmp_path: Path) -> None:
    buffers = make_spool(tmp_path, "mlp-cupti130001") / "raw" / "cupti" / "buffers.bin"
    buffers.write_bytes(buffers.read_bytes()[:-100])
    conversion = convert_target(tmp_path, formats=[])
    assert conversion.chunks_torn == 1
    assert conversion.warnings == ("cupti: the end of the data is missing because the daemon ended",)


def test_an_unknown_format_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no output format is called 'pdf'; available: chrome, chrome-json, perfetto"):
        convert_target(tmp_path / "none", formats=["pdf"])


def test_a_target_that_cannot_be_decoded_leaves_no_files(tmp_path: Path) -> None:
    make_spool(tmp_path, "mlp-cupti26", metadata={"cupti_version": 1})
    with pytest.raises(UnknownVersionError):
        convert_target(tmp_path, formats=[])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "target.json"]


def test_a_missing_target_is_a_spool_error(tmp_path: Path) -> None:
    with pytest.raises(SpoolError):
        convert_target(tmp_path, formats=[])


def ask(line: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(answer(line))
    return said


def test_a_job_is_answered_whatever_happens(tmp_path: Path) -> None:
    make_spool(tmp_path, "graph-cupti26")
    told = ask(json.dumps({"id": 1, "target_dir": str(tmp_path), "formats": ["chrome"]}))
    assert (told["id"], told["ok"]) == (1, True)
    assert told["conversion"]["files"][0][:2] == ["chrome", "trace.json.gz"]
    assert told["conversion"]["summary"]["activities"]["kernel"] == 410
    refused = ask(json.dumps({"id": "b", "target_dir": str(tmp_path / "x"), "formats": []}))
    assert (refused["id"], refused["ok"], refused["reason_code"]) == ("b", False, "SPOOL_INVALID")
    wrong = ask("not json")
    assert (wrong["id"], wrong["ok"], wrong["reason_code"]) == (None, False, "TRACE_FAILED")


def test_a_disk_that_fills_up_while_decoding_is_named_and_nothing_half_written_stays() -> None:
    with small_disk("size=4m") as disk:
        make_spool(disk / "target", "mlp-cupti26")
        before = sorted(disk.rglob("*"))
        taken = fill(disk) / "bytes"
        os.truncate(taken, taken.stat().st_size - 16384)  # room for a part of the columns
        told = json.loads(answer(json.dumps({"id": "a", "target_dir": str(disk / "target"), "formats": []})))
        assert (told["ok"], told["reason_code"]) == (False, "DISK_FULL")
        assert "No space left on device" in told["reason"]
        left = {each for each in disk.rglob("*") if "filler" not in each.parts} - set(before)
        assert not [each for each in left if each.name.endswith((".tmp", ".json.gz"))]


def test_of_libkinetos_own_file_the_chrome_formats_are_exact_copies(tmp_path: Path) -> None:
    OnDemandRequest(trace_id=42, folder="/tmp", name="x_99.json").write(tmp_path)
    TargetInfo(capture_id="c1", host="h", pid=99, process_name="python").write(tmp_path)
    text = trace_text(42).replace('"ms"', ' "ms" ').encode()  # as no writer of ours would lay it out
    kineto_file(tmp_path).write_bytes(text)
    answered = json.loads(answer(json.dumps({"id": 1, "target_dir": str(tmp_path), "formats": [*SUFFIXES]})))
    conversion = answered["conversion"]
    assert conversion["summary"]["activities"] == {"cpu_op": 2}
    assert (tmp_path / "trace.json").read_bytes() == text
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == text
    for _format, name, size, digest in conversion["files"]:
        data = (tmp_path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
    assert len(load_columns(tmp_path / "columns").table("cpu_op")) == 2


def test_a_file_of_libkineto_that_is_not_the_trace_is_damaged(tmp_path: Path) -> None:
    OnDemandRequest(trace_id=42, folder="/tmp", name="x_99.json").write(tmp_path)
    TargetInfo(capture_id="c1", host="h", pid=99, process_name="python").write(tmp_path)
    kineto_file(tmp_path).write_text(trace_text(43))
    answered = json.loads(answer(json.dumps({"id": 1, "target_dir": str(tmp_path), "formats": []})))
    assert (answered["ok"], answered["reason_code"]) == (False, "FILE_DAMAGED")


def kernels(count: int) -> list[dict[str, int]]:
    return [{"start": 1000 + i, "correlation": i} for i in range(count)]


def calls(count: int) -> list[dict[str, int]]:
    return [{"start": 500 + i, "correlation": i} for i in range(count)]


def test_kernels_with_their_launches_are_no_news() -> None:
    assert launch_warnings(trace({"kernel": kernels(100), "cuda_runtime": calls(60), "cuda_driver": calls(100)})) == ()


def test_a_few_from_before_the_recording_are_no_news() -> None:
    assert launch_warnings(trace({"kernel": kernels(100), "cuda_runtime": calls(98)})) == ()


def test_many_kernels_without_a_launch_are_spoken_of() -> None:
    assert launch_warnings(trace({"kernel": kernels(2000), "cuda_runtime": calls(500)})) == (
        "1,500 of 2,000 kernels have no launch in the trace: the calls that launched them were not recorded "
        "(record both cuda_runtime and cuda_driver)",
    )


@pytest.mark.parametrize(
    ("categories", "advice"),
    [
        (
            {"cuda_runtime": "xpu_runtime", "cuda_driver": "xpu_driver"},
            " (record both xpu_runtime and xpu_driver)",
        ),
        ({"cuda_runtime": "pebble_runtime"}, ""),
    ],
)
def test_the_calls_of_another_vendor_have_its_names(categories: dict[str, str], advice: str) -> None:
    (warning,) = launch_warnings(trace({"kernel": kernels(100), "cuda_runtime": calls(50)}, categories=categories))
    assert warning.endswith(f"the calls that launched them were not recorded{advice}")


def test_where_no_calls_were_recorded_there_is_nothing_to_say() -> None:
    assert launch_warnings(trace({"kernel": kernels(100)})) == ()


def test_activities_have_the_names_that_their_vendor_declares() -> None:
    tables = {
        "kernel": [{"start": 0, "duration": 100, "name": "a"}],
        "cuda_runtime": [{"start": 0, "name": "launch"}] * 2,
    }
    value = trace(tables, categories={"cuda_runtime": "pebble_runtime", "cuda_driver": "pebble_driver"})
    assert summarize(value)["activities"] == {"kernel": 1, "pebble_runtime": 2}
    assert "pebble_runtime" in value._repr_html_()


def test_the_summary_of_a_trace() -> None:
    value = trace(
        {
            "kernel": [
                {"start": 0, "duration": 100, "name": "a"},
                {"start": 50, "duration": 100, "name": "b"},
                {"start": 500, "duration": 60, "name": "a"},
                {"start": 0, "duration": 1_000, "name": "c", "device": 1},
            ],
            "gpu_memcpy": [{"start": 150, "duration": 50, "name": "Memcpy"}],
            "cuda_runtime": [],
            "python_function": [
                {"name": "f", "self_samples": 3, "samples": 3},
                {"name": "g", "self_samples": 0, "samples": 3},
                {"name": "f", "self_samples": 2, "samples": 2},
            ],
        },
        length_ns=1_000,
        sample_period_ns=10,
    )
    assert summarize(value) == {
        "activities": {"kernel": 4, "gpu_memcpy": 1, "python_function": 3},
        "gpu_busy_fraction": pytest.approx((0.26 + 1.0) / 2),
        "top_kernels": [
            {"name": "c", "count": 1, "total_ns": 1000},
            {"name": "a", "count": 2, "total_ns": 160},
            {"name": "b", "count": 1, "total_ns": 100},
        ],
        "top_ops": [],
        "top_functions": [{"name": "f", "count": 5, "total_ns": 50, "waiting": 0, "lines": []}],
        "python_samples": {"unknown": 5, "running": 0, "waiting": 0, "idle": 0},
        "native_threads": [],
        "window_start_ns": START_NS,
        "window_end_ns": START_NS + 1_000,
        "out_of_window": 0,
        "iterations": 0,
        "first_iteration": 0,
    }


def test_without_a_gpu_the_busy_share_is_minus_one() -> None:
    assert summarize(trace({}))["gpu_busy_fraction"] == -1.0


def test_only_the_five_longest_kernels_are_named() -> None:
    kernels = [{"duration": number, "name": f"k{number}"} for number in range(1, 8)]
    names = [entry["name"] for entry in summarize(trace({"kernel": kernels}))["top_kernels"]]
    assert names == ["k7", "k6", "k5", "k4", "k3"]


def test_operators_count_without_the_operators_inside_them() -> None:
    ops = [
        {"start": 0, "duration": 100, "name": "aten::linear", "thread": 1, "finished": 1},
        {"start": 10, "duration": 80, "name": "aten::addmm", "thread": 1, "finished": 1},
        {"start": 20, "duration": 30, "name": "aten::linear", "thread": 2, "finished": 1},
        {"start": 950, "duration": 0, "name": "aten::copy_", "thread": 1, "finished": 0},  # to the window's end
    ]
    assert summarize(trace({"cpu_op": ops}, length_ns=1_000))["top_ops"] == [
        {"name": "aten::addmm", "count": 1, "total_ns": 80},
        {"name": "aten::linear", "count": 2, "total_ns": 50},
        {"name": "aten::copy_", "count": 1, "total_ns": 50},
    ]


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(5, 10), (0, 7)], 10),
        ([(0, 3), (5, 9)], 7),
        ([(-5, 2), (98, 300)], 4),
        ([(0, 9), (2, 3)], 9),
    ],
)
def test_the_union_of_intervals(intervals: list[tuple[int, int]], length: int) -> None:
    pairs = np.array(intervals, np.int64).reshape(-1, 2)
    assert covered(pairs[:, 0], pairs[:, 1], 0, 100) == length


def test_samples_of_counters_are_no_activities() -> None:
    kernel = {"start": 0, "duration": 100, "name": "k"}
    found = summarize(trace({"kernel": [kernel], "counter": [sample(0, 900, 50)]}, length_ns=1_000))
    assert (found["activities"], found["gpu_busy_fraction"]) == ({"kernel": 1}, 0.1)
