import io
import json
import re
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.formats.chrome.chrome_writer import base_ns, write_chrome
from kineto_trace.formats.text_sinks import GzipSink, TextSink
from kineto_trace.model.trace import NO_ROW, UNKNOWN_STREAM, Losses, StringTable, Trace, make_table
from kineto_trace.open.raw_target import load_target
from support.trace_files import python_writer
from support.trace_files.chrome_files import event
from support.trace_files.h200 import make_spool
from support.trace_files.traces import BASE_NS, START_NS, target, trace

T0 = (START_NS - BASE_NS) / 1000  # µs


def text_of(value: Trace) -> str:
    file = io.BytesIO()
    with TextSink(file, buffer_bytes=1 << 12) as sink:
        write_chrome(value, sink, trace_name="trace.json")
    return file.getvalue().decode()


def rows_of(value: Trace, category: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(text_of(value))["traceEvents"] if row.get("cat") == category]


KERNEL = {
    "start": 5_000, "duration": 1_234, "name": "void gemm<float>(int)", "device": 1, "context": 2, "stream": 7,
    "correlation": 42, "grid_x": 3, "grid_y": 2, "grid_z": 1, "block_x": 64, "block_y": 1, "block_z": 1,
    "registers": 18, "static_shared_memory": 100, "dynamic_shared_memory": 24, "priority": -1, "graph_id": 9,
    "graph_node_id": 2**40, "channel": 4, "channel_type": 1,
}  # fmt: skip
LAUNCH = {"start": 1_000, "duration": 500, "name": "cudaLaunchKernel", "thread": 77, "correlation": 42, "cbid": 211}


def test_the_head_states_how_many_events_follow() -> None:
    document = json.loads(text_of(trace({"kernel": [KERNEL], "cuda_runtime": [LAUNCH, {**LAUNCH, "correlation": 9}]})))
    assert document["kinetod"]["events"] == len(document["traceEvents"])


def test_a_kernel_and_its_launch() -> None:
    value = trace({"kernel": [KERNEL], "cuda_runtime": [LAUNCH]})
    shown = {
        "queued": 0, "device": 1, "context": 2, "stream": 7, "correlation": 42, "registers per thread": 18,
        "shared memory": 124, "grid": [3, 2, 1], "block": [64, 1, 1], "graph id": 9, "graph node id": 2**40,
        "priority": -1, "channel": 4, "channel_type": 1,
    }  # fmt: skip
    assert rows_of(value, "kernel") == [
        event("kernel", "void gemm<float>(int)", T0 + 5, 1.234, pid=1, tid=7, args=shown)
    ]
    assert rows_of(value, "cuda_runtime") == [
        event("cuda_runtime", "cudaLaunchKernel", T0 + 1, 0.5, pid=4242, tid=77, args={"cbid": 211, "correlation": 42})
    ]
    assert rows_of(value, "ac2g") == [
        {"ph": "s", "id": 42, "pid": 4242, "tid": 77, "ts": T0 + 1, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 42, "pid": 1, "tid": 7, "ts": T0 + 5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ]


def test_a_kernel_whose_launch_was_not_recorded_ends_no_flow() -> None:
    assert rows_of(trace({"kernel": [KERNEL]}), "ac2g") == []


def test_calls_begin_flows_as_in_kinetos_traces() -> None:
    names = ("cudaMemcpyAsync", "cudaDeviceSynchronize", "cudaEventRecord", "cuLaunchKernelEx", "cudaMemset_ptds")
    calls = [{**LAUNCH, "name": name, "correlation": number} for number, name in enumerate(names)]
    assert [row["id"] for row in rows_of(trace({"cuda_runtime": calls}), "ac2g")] == [0, 1, 3, 4]


def test_any_call_that_caused_a_gpu_activity_begins_a_flow() -> None:
    call = {**LAUNCH, "name": "cuMemcpyHtoDAsync"}
    assert [row["ph"] for row in rows_of(trace({"kernel": [KERNEL], "cuda_driver": [call]}), "ac2g")] == ["s", "f"]


def test_copies_have_a_bandwidth_and_peers_have_two_ends() -> None:
    copy = {"start": 1, "duration": 4_928, "name": "Memcpy HtoD (Pinned -> Device)", "stream": 7, "bytes": 131_072}
    peer = {**copy, "peer": 1, "src_device": 1, "dst_device": 2, "src_context": 3, "dst_context": 4, "device": 1}
    first, second = (row["args"] for row in rows_of(trace({"gpu_memcpy": [copy, peer]}), "gpu_memcpy"))
    queue = {"stream": 7, "correlation": 0, "bytes": 131072, "memory bandwidth (GB/s)": 26.597403}
    rest = {"graph id": 0, "graph node id": 0, "channel": 0, "channel_type": 0}
    assert first == {"device": 0, "context": 0, **queue, **rest}
    ends = {"fromDevice": 1, "inDevice": 1, "toDevice": 2, "fromContext": 3, "inContext": 0, "toContext": 4}
    assert second == {**ends, **queue, **rest}


def test_synchronizations_have_rows_of_their_own() -> None:
    wait = {"name": "Stream Wait Event", "type": 2, "stream": 7, "event": 5, "wait_on_stream": 9, "device": 0}
    wait["wait_on_correlation"] = -1
    context = {"name": "Context Sync", "type": 4, "stream": UNKNOWN_STREAM, "device": -1, "correlation": 6}
    value = trace({"cuda_sync": [wait, context], "kernel": [KERNEL]})
    first, second = rows_of(value, "cuda_sync")
    assert (first["pid"], first["tid"], second["pid"], second["tid"]) == (0, 1_000_007, 1, -1)
    assert first["args"] == {
        "cuda_sync_kind": "Stream Wait Event",
        "wait_on_stream": 9,
        "wait_on_cuda_event_record_corr_id": -1,
        "wait_on_cuda_event_id": 5,
        "stream": 7,
        "correlation": 0,
        "device": 0,
        "context": 0,
    }
    assert second["args"] == {
        "cuda_sync_kind": "Context Sync",
        "stream": -1,
        "correlation": 6,
        "device": 1,
        "context": 0,
    }


def test_kernels_that_overlap_on_a_stream_get_another_row() -> None:
    overlapping = {**KERNEL, "start": 5_500, "correlation": 43}
    value = trace({"kernel": [KERNEL, overlapping]})
    assert [row["tid"] for row in rows_of(value, "kernel")] == [7, 2_000_007]
    names = {
        (row["pid"], row["tid"]): row["args"]["name"]
        for row in json.loads(text_of(value))["traceEvents"]
        if row["name"] == "thread_name"
    }
    assert names == {(1, 7): "stream 7 ", (1, 2_000_007): "stream 7 (overlap 1)"}


def test_python_frames_stand_from_outside_to_inside() -> None:
    rows = [
        {"start": 0, "duration": 100, "name": "a.py(1): main", "thread": 5, "depth": 0, "parent": NO_ROW, "samples": 3},
        {"start": 0, "duration": 100, "name": "a.py(2): f", "thread": 5, "depth": 1, "parent": 0, "self_samples": 3},
    ]
    outer, inner = rows_of(trace({"python_function": rows}, sample_period_ns=10), "python_function")
    assert (outer["ts"], outer["dur"]) == (inner["ts"], inner["dur"])
    assert outer["args"] == {
        "Python id": 1,
        "Python parent id": None,
        "Python thread": 5,
        "samples": 3,
        "self samples": 0,
    }
    assert (inner["args"]["Python id"], inner["args"]["Python parent id"]) == (2, 1)


def test_the_header_and_the_end_of_a_file() -> None:
    value = trace(
        {},
        target=target(rank=3, world_size=8, labels={"run": "a"}, framework="torch 2.11", python_version="3.12.1"),
        devices=[{"id": 0, "name": "NVIDIA H200"}],
        versions={"cupti_version": 130001, "cuda_driver_version": 13000},
        losses=Losses(dropped=5, out_of_window=7),
        length_ns=2_000,
    )
    text = text_of(value)
    parsed = json.loads(text)
    assert list(parsed) == [
        "schemaVersion",
        "deviceProperties",
        "host_name",
        "cuda_driver_version",
        "cupti_version",
        "distributedInfo",
        "kinetod",
        "displayTimeUnit",
        "baseTimeNanoseconds",
        "traceEvents",
        "traceName",
    ]
    assert parsed["schemaVersion"] == 1
    assert parsed["deviceProperties"] == [{"id": 0, "name": "NVIDIA H200"}]
    assert parsed["distributedInfo"] == {"backend": "unknown", "rank": 3, "world_size": 8}
    assert (parsed["kinetod"]["records_dropped"], parsed["kinetod"]["records_out_of_window"]) == (5, 7)
    assert parsed["baseTimeNanoseconds"] == BASE_NS
    assert re.search(r'"rank":\s+(\d+)', text)  # how HTA finds it
    assert parsed["traceEvents"][-1] == {
        "name": "Record Window End",
        "ph": "i",
        "s": "g",
        "pid": "",
        "tid": "",
        "ts": T0 + 2,
    }
    assert parsed["traceEvents"][-4]["name"] == "PyTorch Profiler (0)"


def test_no_rank_gives_no_distributed_info() -> None:
    assert "distributedInfo" not in json.loads(text_of(trace({})))


@pytest.mark.parametrize("name", ['a "quoted" name', "back\\slash", "new\nline", "\x00\x1f", "Ä 中 🚀", "\ud800"])
def test_any_name_gives_valid_json(name: str) -> None:
    value = trace({"kernel": [{**KERNEL, "name": name}]}, target=target(process_name=name, threads={5: name}))
    expected = name.encode("utf-8", "replace").decode().replace("\\", "/").replace("\n", "")  # Kineto's rules
    assert rows_of(value, "kernel")[0]["name"] == expected


def test_process_and_thread_rows() -> None:
    value = trace({"kernel": [KERNEL], "overhead": [{"name": "Resource"}]}, target=target(threads={77: "MainThread"}))
    meta = [
        (row["name"], row["pid"], row["tid"], *row["args"].values())
        for row in json.loads(text_of(value))["traceEvents"]
        if row["ph"] == "M"
    ]
    assert meta == [
        ("process_name", 4242, 0, "python"),
        ("process_labels", 4242, 0, "CPU"),
        ("process_sort_index", 4242, 0, 4242),
        ("process_name", 1, 0, "python"),
        ("process_labels", 1, 0, "GPU 1"),
        ("process_sort_index", 1, 0, 5_000_001),
        ("process_name", -1, 0, "CUPTI Overhead"),
        ("process_labels", -1, 0, "CUPTI Overhead"),
        ("process_sort_index", -1, 0, 16_777_226),
        ("thread_name", 1, 7, "stream 7 "),
        ("thread_sort_index", 1, 7, 7),
        ("thread_name", 4242, 77, "thread 77 (MainThread)"),
        ("thread_sort_index", 4242, 77, 77),
        ("process_sort_index", "Spans", 0, 536_870_912),
    ]


def test_the_base_is_shared_by_three_months() -> None:
    assert base_ns(START_NS) == BASE_NS
    assert base_ns(BASE_NS) == BASE_NS
    assert base_ns(BASE_NS - 1) == BASE_NS - 7_889_238 * 10**9


def many(rows: int) -> Trace:
    strings = StringTable()
    name = strings.add("k" * 100)
    columns = {
        "start": START_NS + np.arange(rows) * 100,
        "duration": np.full(rows, 50),
        "name": np.full(rows, name),
        "grid_x": np.arange(rows) % 500,
    }
    return trace({}, tables={"kernel": make_table("kernel", rows, columns)}, strings=tuple(strings.strings))


def test_gzip_in_members_holds_the_same_text() -> None:
    value = many(20_000)
    plain, packed = io.BytesIO(), io.BytesIO()
    with TextSink(plain) as sink:
        write_chrome(value, sink, trace_name="t")
    with GzipSink(packed, buffer_bytes=1 << 18) as sink:
        write_chrome(value, sink, trace_name="t")
    text, rest = b"", packed.getvalue()
    members = 0
    while rest:
        member = zlib.decompressobj(31)
        text += member.decompress(rest)
        rest = member.unused_data
        members += 1
    assert text == plain.getvalue()
    assert members > 10


class Counting(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


@pytest.mark.parametrize("sink_type", [TextSink, GzipSink])
def test_memory_does_not_grow_with_the_trace(sink_type: type[TextSink]) -> None:
    value = many(400_000)  # about 130 MB of text
    tracemalloc.start()
    try:
        with sink_type(Counting()) as sink:
            write_chrome(value, sink, trace_name="t")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80e6


def test_a_plain_python_writer_makes_the_same_events(tmp_path: Path) -> None:
    whole = load_target(make_spool(tmp_path, "mlp-cupti130001")).trace
    value = python_writer.part_of(whole, 10**9)

    def known(rows: Any) -> list[dict[str, Any]]:
        rows = [row for row in rows if row.get("cat") in (*python_writer.KINDS, "ac2g")]
        for row in rows:
            row.get("args", {}).pop("memory bandwidth (GB/s)", None)  # we write fewer digits
        return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))

    assert known(json.loads(text_of(value))["traceEvents"]) == known(python_writer.events(value))


def test_a_file_that_is_read_again_says_what_was_lost_when_it_was_recorded() -> None:
    lost = Losses(dropped=5, undecoded=3, torn=1, out_of_window=7)
    again = load_chrome(io.BytesIO(text_of(trace({"kernel": [{"name": "k", "duration": 5}]}, losses=lost)).encode()))
    assert again.losses == lost
