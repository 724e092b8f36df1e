import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import run_view
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.context import Context
from kineto_trace.model.trace import UNKNOWN_STREAM
from support.trace_files.chrome_files import BASE_NS, document, event, load, load_events, names


def kernel(name: str = "k", ts: float = 0, **changes: Any) -> dict[str, Any]:
    return event("kernel", name, ts, 1, **{"pid": 0, "tid": 7, "args": {}, **changes})


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", "cpu_op"),
        ("Operator", "cpu_op"),
        ("Runtime", "cuda_runtime"),
        ("cuda_runtime", "cuda_runtime"),
        ("xpu_runtime", "cuda_runtime"),
        ("mtia_runtime", "cuda_runtime"),
        ("privateuse1_driver", "cuda_driver"),
        ("Kernel", "kernel"),
        ("Memcpy", "gpu_memcpy"),
        ("gpu_memset", "gpu_memset"),
        ("python_function", "python_function"),
        ("user_annotation", "user_annotation"),
        ("gpu_user_annotation", "gpu_user_annotation"),
        ("overhead", "overhead"),
        ("cuda_sync", "cuda_sync"),
        ("hpu_op", "other"),
        ("Trace", "other"),
    ],
)
def test_categories_of_all_times_have_a_table(category: str, kind: str) -> None:
    trace = load_events(event(category, "e", 1, 2))
    assert list(trace.tables) == [kind]
    assert trace.strings[trace.table(kind).origin["category"][0]] == category


def test_a_complete_event_without_a_duration_is_no_activity() -> None:
    row = event("kernel", "k", 1)
    del row["dur"]
    assert list(load_events(row).tables) == ["other"]


def test_activities_without_a_name_have_an_empty_one_and_break_no_view() -> None:
    rows = [kernel(), kernel(ts=5, args={"correlation": 1}), event("cpu_op", "aten::mm", 0, 9)]
    del rows[1]["name"]
    trace = load_events(*rows)
    assert names(trace, "kernel") == ["k", ""]
    for view in ("findings", "kernels", "kernel_breakdown", "memory_statistics"):
        run_view(view, Context(trace))


def test_times_are_unix_ns_whatever_their_spelling() -> None:
    text = document(event("cpu_op", "a", 4306452651095.381, 0.8), event("cpu_op", "b", 7, 2))
    text = text.replace('"ts": 7, "dur": 2', '"ts": 7e3, "dur": 20e-1')
    ops = load(text).table("cpu_op")
    assert (ops["start"] - BASE_NS).tolist() == [4306452651095381, 7_000_000]
    assert ops["duration"].tolist() == [800, 2000]


def test_a_base_behind_the_events_counts_too() -> None:
    text = json.dumps({"traceEvents": [event("cpu_op", "a", 5, 1)], "baseTimeNanoseconds": 1000})
    assert load(text).table("cpu_op")["start"].tolist() == [6000]


def test_times_of_less_than_a_nanosecond_are_rounded() -> None:
    ops = load_events(event("cpu_op", "a", 1.0006, 0.12345)).table("cpu_op")
    assert (ops["start"] - BASE_NS).tolist() == [1001]
    assert ops["duration"].tolist() == [123]
    assert ops.origin["dur_real"].tolist() == [0.12345]


def test_documents_may_be_bare_lists_compressed_or_have_a_byte_order_mark(tmp_path: Path) -> None:
    row = json.dumps(event("cpu_op", "a", 1, 1))
    half = len(row) // 2
    parts = [b"[" + row[:half].encode(), row[half:].encode() + b"]"]
    forms = {
        "list": b"".join(parts),
        "mark": b"\xef\xbb\xbf" + b"".join(parts),
        "gzip": gzip.compress(b"".join(parts)),
        "members": b"".join(gzip.compress(part) for part in parts) + bytes(8),
    }
    for name, data in forms.items():
        path = tmp_path / name
        path.write_bytes(data)
        trace = load_chrome(path)
        assert (names(trace, "cpu_op"), trace.notes) == (["a"], ()), name


CUT = (
    '{"ph":"X","pid":416,"tid":-416,"ts":2915995405065.643,"dur":1.5e+3,"cat":"cpu_op","name":"a\\u00e4\\n\\"b",'
    '"args":{"share":-0.000000001234567890123,"far":1234567890123456.25e-12,"flag":false,"none":null,"many":[1.25,"x"]}}'
)


def test_no_event_is_lost_wherever_a_piece_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"traceEvents": [\n' + ",\n".join([CUT] * 4) + "\n]}"
    lost = []
    for size in range(len(CUT) + 20, 2 * len(CUT) + 40):
        monkeypatch.setattr("kineto_trace.formats.chrome.chrome_reader.PIECE_BYTES", size)
        trace = load(text)
        if trace.notes or len(trace.table("cpu_op")) != 4:
            lost.append((size, trace.notes))
    assert lost == []


def test_files_are_read_piece_by_piece() -> None:
    class Slow(io.BytesIO):
        def readinto(self, view: Any) -> int:
            return super().readinto(memoryview(view)[:7])

    text = document(*(event("cpu_op", f"op {n}", n, 1, args={"Ev Idx": n}) for n in range(50)), traceName="x")
    trace = load_chrome(Slow(text.encode()))
    assert names(trace, "cpu_op") == [f"op {n}" for n in range(50)]
    assert trace.table("cpu_op").origin["event_index"].tolist() == list(range(50))


def test_a_kernel_has_its_arguments_in_columns() -> None:
    args = {
        "External id": 9, "queued": 0, "device": 1, "context": 2, "stream": 13, "correlation": 5120,
        "registers per thread": 18, "shared memory": 4356, "blocks per SM": 0.25, "grid": [16, 2, 1],
        "block": [256, 1, 3], "graph node id": 2**64 - 1, "priority": -5,
    }  # fmt: skip
    trace = load_events(kernel(args=args), kernel(args={"grid": [1]}))
    table = trace.table("kernel")
    assert {name: table[name].tolist() for name in ("device", "stream", "correlation", "external_id", "registers")} == {
        "device": [1, 0],
        "stream": [13, 7],
        "correlation": [5120, 0],
        "external_id": [9, 0],
        "registers": [18, 0],
    }
    assert [table[f"grid_{axis}"][0] for axis in "xyz"] == [16, 2, 1]
    assert [table[f"block_{axis}"][0] for axis in "xyz"] == [256, 1, 3]
    assert (table["graph_node_id"][0], table["priority"].tolist()) == (2**64 - 1, [-5, -(2**31)])
    assert trace.strings[table.origin["args"][0]] == '"blocks per SM": 0.25'
    assert trace.strings[table.origin["args"][1]] == '"grid": [1]'


def test_old_spellings_and_quoted_numbers_fill_the_columns() -> None:
    trace = load_events(kernel(args={"external id": 4, "stream": "20", "correlation": 7.0}))
    table = trace.table("kernel")
    assert [table[name][0] for name in ("external_id", "stream", "correlation")] == [4, 20, 7]


def test_gpu_rows_without_arguments_are_where_pid_and_tid_say() -> None:
    trace = load_events(kernel(pid=3, tid="stream 20 "), kernel(pid="GPU 1", tid=9), event("cpu_op", "host", pid=55))
    table = trace.table("kernel")
    assert (table["device"].tolist(), table["stream"].tolist()) == ([3, 1], [20, 9])


def test_copies_have_their_kinds_from_their_names() -> None:
    peer = {"fromDevice": 0, "inDevice": 1, "toDevice": 2, "fromContext": 3, "inContext": 4, "toContext": 5}
    trace = load_events(
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", args={"bytes": 8, "memory bandwidth (GB/s)": 0.5}),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", args=peer),
        event("gpu_memset", "Memset (Device)"),
    )
    table = trace.table("gpu_memcpy")
    assert [table[name].tolist() for name in ("copy_kind", "src_kind", "dst_kind", "peer")] == [
        [1, 10], [1, 3], [3, 3], [0, 1],
    ]  # fmt: skip
    assert [int(table[name][1]) for name in ("src_device", "device", "dst_device", "context")] == [0, 1, 2, 4]
    assert table.origin["bandwidth"][0] == 0.5
    assert np.isnan(table.origin["bandwidth"][1])
    assert trace.table("gpu_memset")["memory_kind"].tolist() == [3]


def test_synchronizations_without_a_stream_have_none() -> None:
    args = {"stream": -1, "correlation": 3, "device": 0, "context": 1, "wait_on_stream": 7}
    trace = load_events(
        event("cuda_sync", "Context Sync", args=args), event("cuda_sync", "Event Sync", args={"stream": 7})
    )
    table = trace.table("cuda_sync")
    assert table["stream"].tolist() == [UNKNOWN_STREAM, 7]
    assert (table["type"].tolist(), table["wait_on_stream"].tolist()) == ([4, 1], [7, -1])
    assert table["device"].tolist() == [0, -1]


def test_memory_events_are_instants_of_that_name() -> None:
    args = {"Bytes": -512, "Addr": 2**63 + 5, "Total Allocated": 10, "Device Id": -1, "Device Type": 0}
    row = {"ph": "i", "s": "t", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 2, "ts": 3}
    trace = load_events({**row, "args": args}, {**row, "name": "mark"})
    table = trace.table("cpu_instant_event")
    assert (table["bytes"][0], table["address"][0], table["device"][0]) == (-512, 2**63 + 5, -1)
    assert (table["total_allocated"][0], table["total_reserved"][0], table["thread"][0]) == (10, -1, 2)
    assert names(trace, "other") == ["mark"]


def test_ops_keep_their_external_ids_unless_these_are_used_twice() -> None:
    trace = load_events(
        event("cpu_op", "a", 0, 9, args={"External id": 5, "Sequence number": 3, "Input Dims": [[1]]}),
        event("user_annotation", "b", 1, 1, args={"External id": 5}),
        event("cpu_op", "c", 2, 1),
    )
    ops = trace.table("cpu_op")
    assert ops["id"].tolist() == [5, 6]
    assert trace.table("user_annotation")["id"].tolist() == [7]
    assert trace.table("user_annotation").origin["external_id"].tolist() == [5]
    assert (ops["sequence"].tolist(), trace.strings[ops["inputs"][0]]) == ([3, -1], '"Input Dims": [[1]]')
    assert trace.table("user_annotation")["scope"].tolist() == [7]


def test_arrows_tell_which_thread_torch_numbers() -> None:
    trace = load_events(
        event("cpu_op", "forward", 1, 5, args={"Sequence number": 1, "Fwd thread id": 0}),
        event("cpu_op", "backward", 10, 5, tid=3, args={"Sequence number": 1, "Fwd thread id": 1}),
        {"ph": "s", "id": 4, "pid": 1, "tid": 2, "ts": 1, "cat": "fwdbwd", "name": "fwdbwd"},
        {"ph": "f", "id": 4, "pid": 1, "tid": 3, "ts": 10, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"},
    )
    ops = trace.table("cpu_op")
    assert (ops["torch_thread"].tolist(), ops["scope"].tolist()) == ([1, 0], [0, 1])
    assert trace.table("flow")["thread"].tolist() == [2, 3]


def test_threads_of_one_number_in_two_processes_differ() -> None:
    rows = [event("cpu_op", "a", n, 1, pid=1, tid=8) for n in range(3)] + [event("cpu_op", "b", 0, 1, pid=2, tid=8)]
    named = [event("cpu_op", "c", 0, 1, tid="Thread 77 (x)"), event("cpu_op", "d", 0, 1, tid="main")]
    assert load_events(*rows, *named).table("cpu_op")["thread"].tolist() == [8, 8, 8, 2**31, 77, 2**31 + 1]


def test_python_calls_know_their_callers_by_id() -> None:
    trace = load_events(
        event("python_function", "inner", 1, 2, args={"Python id": 2, "Python parent id": 1, "Python module id": 4}),
        event("python_function", "outer", 0, 9, args={"Python id": 1, "Python parent id": None}),
        event("python_function", "leaf", 1, 1, args={"Python id": 3, "Python parent id": 2}),
    )
    table = trace.table("python_function")
    assert (table["parent"].tolist(), table["depth"].tolist()) == ([1, -1, 0], [1, 0, 2])
    assert table["module"].tolist() == [4, -1, -1]


def test_python_calls_without_ids_nest_by_time() -> None:
    rows = [("b", 1, 2), ("a", 0, 9), ("c", 1, 1)]
    table = load_events(*(event("python_function", *row) for row in rows)).table("python_function")
    assert (table["parent"].tolist(), table["depth"].tolist()) == ([1, -1, 0], [1, 0, 2])


@pytest.mark.parametrize(
    ("head", "types", "reasons"),
    [
        ({"activity_types": ["kernel"], "not_recorded": {"kernel": "busy"}}, ["kernel"], {"kernel": "busy"}),
        ({"activity_types": []}, [], {}),
        (
            {"activity_types": ["kernel", 7], "not_recorded": {"kernel": 7, "cpu_op": "no torch"}},
            None,
            {"cpu_op": "no torch"},
        ),
        ({"activity_types": "kernel", "not_recorded": ["kernel"]}, None, {}),
        ({}, None, {}),
    ],
)
def test_the_requested_activity_types_are_read(
    head: dict[str, Any], types: list[str] | None, reasons: dict[str, str]
) -> None:
    found = load_events(event("cpu_op", "a", 3, 4), kinetod=head).target
    assert (found.activity_types, found.not_recorded) == (types, reasons)


@pytest.mark.parametrize(("told", "kept"), [(1.25, 1.25), (2, 2.0), (-1, 0.0), (1e9, 0.0), ("1.5", 0.0), (None, 0.0)])
def test_the_ratio_of_steps_is_read_if_it_is_one(told: Any, kept: float) -> None:
    assert load_events(event("cpu_op", "a", 3, 4), kinetod={"step_ratio": told}).target.step_ratio == kept
    assert load_events(event("cpu_op", "a", 3, 4), kinetod={"least_step_ratio": told}).target.least_step_ratio == kept


def test_the_process_is_described() -> None:
    def meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}

    trace = load_events(
        meta("process_name", 55, 0, name="python3"),
        meta("thread_name", 55, 56, name="thread 56 (pt_autograd_0)"),
        meta("thread_name", 0, 7, name="stream 7 "),
        event("cpu_op", "a", 3, 4, pid=55, tid=56),
        event("cpu_op", "b", 5, 10, pid=55, tid=56),
        host_name="node-1",
        distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8},
        deviceProperties=[{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
        cuda_runtime_version=13000,
        with_stack=1,
    )
    target = trace.target
    assert (target.pid, target.process_name, target.threads) == (55, "python3", {56: "pt_autograd_0"})
    assert (target.host, target.rank, target.world_size, target.options) == ("node-1", 3, 8, {"with_stack": True})
    assert (trace.devices[0]["numSms"], trace.versions) == (132, {"cuda_runtime_version": 13000})
    assert (trace.window_start_ns - BASE_NS, trace.window_end_ns - BASE_NS) == (3000, 15000)
