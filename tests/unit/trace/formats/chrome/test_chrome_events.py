"""Rows of operators and of what belongs to them."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.trace import NO_MODULE, NO_ROW, NO_STRING, Table, Trace
from support.trace_files.chrome_files import event
from support.trace_files.traces import BASE_NS, START_NS, target, trace

T0 = (START_NS - BASE_NS) / 1000  # µs
OP = {"thread": 7, "sequence": -1, "finished": 1, "inputs": NO_STRING, "torch_thread": 1}
FORWARD = {**OP, "start": 1_000, "duration": 500, "name": "aten::mm", "id": 1, "sequence": 9}
BACKWARD = {
    **OP,
    "start": 4_000,
    "duration": 300,
    "name": "MmBackward0",
    "id": 3,
    "sequence": 9,
    "thread": 8,
    "torch_thread": 2,
    "forward_thread": 1,
    "scope": 1,
}
RANGE = {**OP, "start": 900, "duration": 9_000, "name": "my step", "id": 2, "scope": 7}
KERNEL = {"start": 5_000, "duration": 100, "name": "gemm", "stream": 7, "correlation": 42, "external_id": 1}
LAUNCH = {"start": 1_100, "duration": 50, "name": "cudaLaunchKernel", "thread": 7, "correlation": 42, "external_id": 1}


def document(value: Trace) -> dict[str, Any]:
    file = io.BytesIO()
    with TextSink(file) as sink:
        write_chrome(value, sink, trace_name="trace.json")
    found: dict[str, Any] = json.loads(file.getvalue())
    return found


def rows_of(rows: Mapping[str, Sequence[Mapping[str, Any]]], category: str) -> list[dict[str, Any]]:
    return [row for row in document(trace(rows))["traceEvents"] if row.get("cat") == category]


def test_an_operator_and_an_annotation() -> None:
    rows = {"cpu_op": [FORWARD, BACKWARD], "user_annotation": [RANGE]}
    first = {"External id": 1, "Record function id": 0, "Sequence number": 9, "Fwd thread id": 0, "Ev Idx": 0}
    second = {"External id": 3, "Record function id": 0, "Sequence number": 9, "Fwd thread id": 1, "Ev Idx": 2}
    assert rows_of(rows, "cpu_op") == [
        event("cpu_op", "aten::mm", T0 + 1, 0.5, pid=4242, tid=7, args=first),
        event("cpu_op", "MmBackward0", T0 + 4, 0.3, pid=4242, tid=8, args=second),
    ]
    [annotation] = rows_of(rows, "user_annotation")
    assert annotation["args"] == {"External id": 2, "Record function id": 0, "Ev Idx": 1}


def test_forward_and_backward_operators_are_linked() -> None:
    place = {"pid": 4242, "cat": "fwdbwd", "name": "fwdbwd", "id": 1}
    assert rows_of({"cpu_op": [BACKWARD, FORWARD]}, "fwdbwd") == [
        {"ph": "s", "tid": 7, "ts": T0 + 1, **place},
        {"ph": "f", "tid": 8, "ts": T0 + 4, "bp": "e", **place},
    ]


def test_inputs_are_arguments_and_names_stay_names() -> None:
    value = trace({"cpu_op": [FORWARD, BACKWARD]})
    text = '"Concrete Inputs": ["", "\\"x\\""], "Input Dims": [[2], []]'
    table = value.tables["cpu_op"]
    inputs = np.array([len(value.strings), NO_STRING], np.int32)
    value = replace(
        value, strings=(*value.strings, text), tables={"cpu_op": Table("cpu_op", {**table.columns, "inputs": inputs})}
    )
    first, second = (row for row in document(value)["traceEvents"] if row.get("cat") == "cpu_op")
    assert first["args"]["Concrete Inputs"] == ["", '"x"']
    assert first["args"]["Input Dims"] == [[2], []]
    assert "Input Dims" not in second["args"]


def test_an_operator_that_still_ran_is_marked() -> None:
    [row] = rows_of({"cpu_op": [{**FORWARD, "finished": 0}]}, "cpu_op")
    assert row["args"]["finished"] is False


def test_an_operator_called_kernel_is_no_kernel() -> None:
    assert [row["name"] for row in rows_of({"cpu_op": [{**FORWARD, "name": "kernel"}]}, "cpu_op")] == ["Kernel"]


def test_gpu_work_and_its_call_name_the_operator() -> None:
    unlinked = {**KERNEL, "start": 9_000, "external_id": 0}
    rows = {"kernel": [KERNEL, unlinked], "cuda_runtime": [LAUNCH], "cpu_op": [FORWARD]}
    assert [row["args"].get("External id") for row in rows_of(rows, "kernel")] == [1, None]
    assert [row["args"]["External id"] for row in rows_of(rows, "cuda_runtime")] == [1]


def test_annotations_stand_out_over_their_gpu_work() -> None:
    image = {"start": 5_000, "duration": 100, "name": "my step", "device": 2, "stream": 7, "external_id": 2}
    assert rows_of({"gpu_user_annotation": [image]}, "gpu_user_annotation") == [
        event("gpu_user_annotation", "my step", T0 + 4.999, 0.102, pid=2, tid=7, args={"External id": 2})
    ]


def test_annotations_of_a_stream_that_overlap_without_nesting_go_to_rows_of_their_own() -> None:
    spans = [(0, 100), (10, 80), (50, 200), (60, 210), (300, 10)]
    images = [
        {"start": start, "duration": length, "name": "a", "stream": 7, "external_id": 1} for start, length in spans
    ]
    rows = rows_of({"gpu_user_annotation": images}, "gpu_user_annotation")
    assert [row["tid"] for row in rows] == [7, 7, 2_000_007, 4_000_007, 7]


def test_an_allocation() -> None:
    allocation = {
        "start": 2_000, "name": "[memory]", "thread": 7, "bytes": -512, "address": 2**63 + 5, "total_allocated": 1024,
        "total_reserved": -1, "device_type": 1, "device": 0,
    }  # fmt: skip
    (row,) = rows_of({"cpu_op": [FORWARD], "cpu_instant_event": [allocation]}, "cpu_instant_event")
    assert row.pop("args") == {
        "Bytes": -512,
        "Total Allocated": 1024,
        "Device Id": 0,
        "Device Type": 1,
        "Addr": 2**63 + 5,
        "finished": False,
        "Ev Idx": 1,
    }
    place = {"name": "[memory]", "pid": 4242, "tid": 7, "ts": T0 + 2}
    assert row == {"ph": "i", "cat": "cpu_instant_event", "s": "t", **place}


def test_exact_python_calls_keep_their_times() -> None:
    calls = [
        {"start": 0, "duration": 100, "name": "a.py(1): main", "thread": 7, "parent": NO_ROW, "module": NO_MODULE},
        {"start": 0, "duration": 100, "name": "nn.Module: Linear_0", "thread": 7, "parent": 0, "depth": 1, "module": 4},
    ]
    outer, inner = rows_of({"cpu_op": [FORWARD], "python_function": calls}, "python_function")
    assert (outer["ts"], outer["dur"]) == (inner["ts"], inner["dur"])
    assert outer["args"] == {"Python id": 1, "Python parent id": None, "Python thread": 7, "Ev Idx": 1}
    assert inner["args"] == {
        "Python id": 2,
        "Python parent id": 1,
        "Python thread": 7,
        "Python module id": 4,
        "Ev Idx": 2,
    }


def test_calls_of_modules_beside_samples_keep_their_numbers() -> None:
    frame = {"start": 0, "duration": 4_000, "name": "f", "thread": 7, "parent": NO_ROW, "samples": 2, "module": -1}
    module = {**frame, "name": "nn.Module: Linear_0", "samples": 0, "module": 4}
    events = document(trace({"python_function": [frame, module]}, sample_period_ns=100))["traceEvents"]
    args = {row["name"]: row["args"] for row in events if row.get("cat") == "python_function"}
    assert "Python module id" not in args["f"]
    assert args["nn.Module: Linear_0"]["Python module id"] == 4


def test_sampled_frames_do_not_cut_what_was_recorded_exactly() -> None:
    """The frame was first seen inside the op, and not any more inside the call."""
    frame = {"start": 1_200, "duration": 4_000, "name": "f", "thread": 7, "parent": NO_ROW, "samples": 2}
    wait = {**LAUNCH, "start": 5_000, "duration": 900, "name": "cudaDeviceSynchronize"}
    rows = {"cpu_op": [FORWARD], "cuda_runtime": [wait], "python_function": [frame]}
    value = trace(rows, sample_period_ns=100)
    events = [row for row in document(value)["traceEvents"] if row.get("cat") in rows]
    assert [(row["name"], row["ts"] - T0, row["dur"]) for row in events] == [
        ("f", 1.0, 4.9),
        ("aten::mm", 1.0, 0.5),
        ("cudaDeviceSynchronize", 5.0, 0.9),
    ]


def test_threads_of_operators_have_names() -> None:
    unknown = {"name": "[memory]", "thread": 0}
    rows = {"cpu_op": [FORWARD, BACKWARD], "cpu_instant_event": [unknown]}
    value = trace(rows, target=target(threads={8: "pt_autograd_0"}))
    names = {row["tid"]: row["args"]["name"] for row in document(value)["traceEvents"] if row["name"] == "thread_name"}
    assert names == {
        0: "thread 0 (unknown: allocations)",
        7: "thread 7 (python)",
        8: "thread 8 (pt_autograd_0)",
    }


def test_the_options_of_the_capture_are_keys_of_the_file() -> None:
    options = {"record_shapes": True, "with_flops": False, "stack_trace": True, "stack_sample_hz": 50}
    found = document(trace({}, target=target(options=options)))
    keys = ("record_shapes", "with_stack", "with_flops", "with_modules")
    assert [found.get(key) for key in keys] == [1, 1, None, None]


def test_a_communication_kernel_has_what_its_operator_says_about_the_collective() -> None:
    op = {**FORWARD, "name": "record_param_comms", "inputs": 0}
    kernels = [{**KERNEL, "name": name} for name in ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm")]
    value = trace({"cpu_op": [op], "cuda_runtime": [LAUNCH], "kernel": kernels})
    value = replace(value, strings=('"Collective name": "allreduce", "Seq": 4', *value.strings[1:]))
    found = [row for row in document(value)["traceEvents"] if row.get("cat") in ("cpu_op", "kernel")]
    assert [row["args"].get("Seq") for row in found] == [4, 4, None]
    assert found[1]["args"]["Collective name"] == "allreduce"
