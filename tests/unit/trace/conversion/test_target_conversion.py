import gzip
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, SPACE_THREAD_NAME, STACK_SAMPLE
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.conversion.worker_job import answer
from kineto_trace.errors import FormatError, SpoolError, UnknownVersionError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file
from kineto_trace.spool.raw_records import RawWriter
from kineto_trace.store.output_formats import SUFFIXES
from kineto_trace.store.parquet_folder import load_columns
from support.peers.on_demand_kineto import trace_text
from support.trace_files.h200 import make_spool, recording, string_entry


def add_stacks(target_dir: Path, samples: list[tuple[int, int, int]], format: str = "python_stacks/1") -> None:
    directory = target_dir / "raw" / "python_stacks"
    with RawWriter(directory, source="python_stacks", format=format, metadata={"hz": 100}) as writer:
        data = b"".join(STACK_SAMPLE.pack(time, thread, node, 0, 0) for time, thread, node in samples)
        writer.append_buffer(data, sequence=0, records=len(samples))
        writer.append_strings(string_entry(1, SPACE_PYTHON_CODE, b"train.py\x0012\x00main"))
        writer.append_strings(string_entry(1, SPACE_STACK_NODE, struct.pack("<II", 0, 1)))
        writer.append_strings(string_entry(9, SPACE_THREAD_NAME, b"loader"))
        writer.finish(metadata={}, record_bytes={}, records=len(samples), dropped=4)


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
    assert conversion.warnings[0] == ("python_stacks: records of the unknown format 'python_stacks/99' are left out")
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
    assert conversion.warnings == ("cupti: the last data was truncated when the daemon ended",)


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
