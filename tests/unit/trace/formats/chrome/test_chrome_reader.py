import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import run_view
from kineto_trace.base import quantities
from kineto_trace.base.quantities import KEPT_FREE_BYTES
from kineto_trace.errors import FileError
from kineto_trace.formats.chrome.chrome_native_reader import PADDING
from kineto_trace.formats.chrome.chrome_reader import MAX_HEAD_BYTES, MEMBER_BYTES, PIECE_BYTES, load_chrome
from kineto_trace.model.context import Context
from kineto_trace.model.trace import UNKNOWN_STREAM, Trace
from kineto_trace.structure.activity_links import gpu
from support.trace_files.chrome_files import BASE_NS, back, document, event, load, load_events, names, written


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


GOOD = '{"ph":"X","cat":"cpu_op","name":"good","pid":1,"tid":2,"ts":1.5,"dur":2,"args":{"External id":5}}'


def named(name: str) -> str:
    return GOOD.replace("good", name)


def read(*rows: str, end: str = "]}") -> Trace:
    return load('{"traceEvents":[' + ",\n".join(rows) + end)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"hello", "it begins with b'hello', not with a JSON object or list"),
        (b"{}", "it is an empty object"),
        (b'{"a":1,"b":[]}', "it has no traceEvents list; its members are a, b"),
        (b'{"traceEvents":null}', "it has no traceEvents list; its members are traceEvents"),
        (b"[1,2]", "skipped 2 entries other than events in the event list, at bytes 1, 3"),
        (b'[{"a":1}]', "it is a list of objects that are not events"),
        (b'[{"ph":"X"', "the file is truncated in the middle of an event, after 0 events of an unknown number"),
        (gzip.compress(b"[" + GOOD.encode(), mtime=0)[:40], "the compressed file is truncated"),
        (gzip.compress(b"[]", mtime=0)[:10] + b"\xff" * 8, "the compressed data is damaged before byte 18 of the file"),
    ],
)
def test_what_is_no_trace_is_named(data: bytes, says: str) -> None:
    with pytest.raises(FileError) as caught:
        load(data)
    assert str(caught.value).startswith("trace.json is not a trace: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["[]", '{"traceEvents":[]}'])
def test_a_trace_without_events_is_one(text: str) -> None:
    trace = load(text)
    assert (dict(trace.tables), trace.notes, trace.window_end_ns) == ({}, (), 0)


def test_a_file_that_ends_in_an_event_says_so() -> None:
    trace = read(GOOD, GOOD, GOOD[:50], end="")
    assert trace.notes == ("the file is truncated in the middle of an event, after 2 events of an unknown number",)
    assert trace.losses.undecoded == 1


@pytest.mark.parametrize("end", ["", ","])
def test_a_file_that_ends_between_events_says_so(end: str) -> None:
    trace = read(GOOD, end=end)
    assert trace.notes == ("the file is truncated in its list of events, after 1 event of an unknown number",)
    assert trace.losses.undecoded == 0


def test_a_cut_file_that_states_how_many_events_it_had_says_how_much_is_there() -> None:
    trace = load('{"kinetod":{"events":7},"traceEvents":[' + GOOD + "," + GOOD)
    assert trace.notes == ("the file is truncated in its list of events, after 2 of about 7 events",)


def test_a_file_that_ends_behind_its_events_says_so() -> None:
    assert read(GOOD, end="]").notes == ("the file is truncated after its events",)


def test_every_cut_of_a_file_gives_the_events_before_it() -> None:
    text = '{"traceEvents":[' + ",".join(named(f"op {n}") for n in range(3)) + "]}"
    for cut in range(text.index("{", 1) + len(GOOD) + 1, len(text)):
        trace = load(text[:cut])
        whole = (cut - text.index("{", 1) + 1) // (len(named("op 0")) + 1)
        assert names(trace, "cpu_op") == [f"op {n}" for n in range(whole)], cut
        assert trace.notes


def test_a_cut_compressed_file_gives_what_is_there() -> None:
    rows = ",\n".join(named(f"op {n * n}") for n in range(5000))
    trace = load(gzip.compress(f"[{rows}]".encode())[:-2000])
    assert 1000 < len(trace.table("cpu_op")) < 5000
    assert trace.notes[0] == "the compressed file is truncated"
    assert trace.notes[1].endswith(" events of an unknown number")


def test_a_compressed_file_that_is_damaged_in_its_middle_says_about_how_many_events_it_had() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**62, 100_000)
    first = gzip.compress(f"[{','.join(named(f'op {n}') for n in numbers)},".encode())
    found = re.search(r"after 100000 of about (\d+) events$", load(first + first[:10] + b"\xff" * len(first)).notes[1])
    assert found and 150_000 < int(found[1]) <= 200_000


def test_bytes_behind_the_trace_are_told_of() -> None:
    note = ("the data after the end of the trace was not read",)
    assert read(GOOD, end="]} more").notes == note
    packed = gzip.compress(f"[{GOOD}]".encode())
    assert load(packed + b"more").notes == ("the data after the end of the compressed data was not read",)
    assert load(packed + bytes(512)).notes == ()


def test_reading_goes_on_behind_an_event_that_cannot_be_read() -> None:
    for bad in (GOOD[:40], '{"ph":"X" @}', "{{{", GOOD[:-1], GOOD.replace("1.5", "1.5.5"), "@@@"):
        trace = read(named("a"), bad, named("b"), named("c"))
        assert names(trace, "cpu_op") == ["a", "b", "c"], bad
        at = len('{"traceEvents":[') + len(named("a")) + 2
        assert trace.notes[0].startswith(f"1 event at byte {at} could not be read: "), trace.notes
        assert trace.losses.undecoded == 1


def test_what_follows_damage_at_the_end_is_not_lost() -> None:
    trace = read(named("a"), GOOD[:60], end='],"traceName":"x.json"}')
    assert names(trace, "cpu_op") == ["a"]
    assert trace.head == {"traceName": '"x.json"'}


def test_an_event_whose_arguments_cannot_be_read_loses_only_these() -> None:
    trace = read(GOOD.replace('"External id":5', '"External id":5,"x":@@@'), named("b"))
    assert names(trace, "cpu_op") == ["good", "b"]
    assert trace.notes == ("the arguments of 1 event at byte 16 could not be read: a JSON value is missing",)


def test_each_of_many_such_events_in_a_row_is_read() -> None:
    damaged = [named(text).replace('"External id":5', '"x":@@@') for text in "abc"]
    trace = read(*damaged, named("d"))
    assert names(trace, "cpu_op") == ["a", "b", "c", "d"]
    assert trace.notes[0].startswith("the arguments of 3 events at bytes ")


def test_items_that_are_no_events_are_counted() -> None:
    trace = read(GOOD, "null", "[1,2]")
    assert trace.notes == ("skipped 2 entries other than events in the event list, at bytes 115, 121",)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ('say "hi"', 'say "hi"'),
        ('a", "b', 'a", "b'),
        ('5" disk', '5" disk'),
        ("C:\\Users\\x", "C:\\Users\\x"),
        ("C:\\dir\\", "C:\\dir\\"),
        ("tab\there\x01", "tab\there\x01"),
        ("line\nbreak", "line\nbreak"),
    ],
)
def test_names_that_are_no_json_are_mended(name: str, meant: str) -> None:
    trace = read(GOOD, named(name), GOOD)
    assert names(trace, "cpu_op") == ["good", meant, "good"]
    assert trace.notes == ("1 event was repaired: invalid JSON (quotes, escapes, words)",)
    assert trace.losses.undecoded == 0


def test_arguments_that_are_no_json_are_mended() -> None:
    args = '"x":N/A,"path":"C:\\Users\\x","n":nan,"deep":[{"a":-inf}],"Call stack":"f("a.py")"'
    found = back('{"traceEvents":[' + GOOD.replace('"External id":5', args) + "]}")["traceEvents"][0]["args"]
    assert repr(found["n"]) == "nan"
    del found["n"]
    assert found == {"x": "N/A", "path": "C:\\Users\\x", "deep": [{"a": float("-inf")}], "Call stack": 'f("a.py")'}


def test_heads_that_are_no_json_are_mended() -> None:
    trace = read(GOOD, end='],"traceName":"C:\\Users\\x","value":N/A}')
    assert {name: json.loads(text) for name, text in (trace.head or {}).items()} == {
        "traceName": "C:\\Users\\x",
        "value": "N/A",
    }
    assert trace.notes == ()


def test_a_damaged_head_does_not_hide_the_events() -> None:
    trace = load('{"a":1,"b" @ "c":2,"traceEvents":[' + GOOD + "]}")
    assert names(trace, "cpu_op") == ["good"]
    assert trace.notes == ("the part before the events could not be read from byte 7 on: a colon is missing",)


def test_a_damaged_tail_is_told_of() -> None:
    trace = read(GOOD, end='],"tail":@}')
    assert trace.notes[0].startswith("the part after the events could not be read from byte")


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    trace = load(b"[" + GOOD.replace("good", "caf?").encode().replace(b"?", b"\xe9") + b"]")
    assert names(trace, "cpu_op") == ["caf\ufffd"]


def test_an_odd_base_is_told_of() -> None:
    trace = read(GOOD, end='],"baseTimeNanoseconds":"soon"}')
    assert trace.notes == ("baseTimeNanoseconds is ignored as invalid (soon): times are those in the events",)
    assert trace.table("cpu_op")["start"].tolist() == [1500]


def test_what_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineto_trace.formats.chrome.chrome_reader.PIECE_BYTES", 1 << 12)
    monkeypatch.setattr("kineto_trace.formats.chrome.chrome_reader.MAX_EVENT_BYTES", 1 << 14)

    class Endless(io.BytesIO):
        def readinto(self, view: Any) -> int:
            return super().readinto(memoryview(view)[:1000])

    text = "[" + GOOD + ',{"ph":"X","name":"' + "x" * 100_000 + '"},' + named("b") + "]"
    trace = load_chrome(Endless(text.encode()))
    assert names(trace, "cpu_op") == ["good", "b"]
    assert trace.losses.undecoded == 1


def test_a_head_of_very_many_members_is_given_up() -> None:
    members = "".join(f'"k{n}":0,' for n in range(MAX_HEAD_BYTES // MEMBER_BYTES + 1))
    with pytest.raises(FileError, match=r"is not a trace: too much data outside events \(\d+ members\)"):
        load("{" + members + '"traceEvents":[' + GOOD + "]}")


def test_what_takes_more_memory_than_is_free_is_an_error_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = PIECE_BYTES + PADDING
    monkeypatch.setattr(quantities, "free_memory", lambda: KEPT_FREE_BYTES + piece)
    assert names(read(GOOD), "cpu_op") == ["good"]
    monkeypatch.setattr(quantities, "free_memory", lambda: KEPT_FREE_BYTES + piece - 1)
    with pytest.raises(MemoryError, match=r"trace\.json needs another 4 MiB of memory, but only 260 MiB are free"):
        read(GOOD)


def _rank(pid: Any, gpu: Any, thread: int, at: int, name: str) -> list[dict[str, Any]]:
    """An operator, its call and its kernel, with the ids that every process has."""
    ids = {"correlation": 7, "External id": 3}
    return [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::{name}", "pid": pid, "tid": thread, "ts": at, "dur": 40,
         "args": {"External id": 3}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "tid": thread, "ts": at + 5,
         "dur": 8, "args": ids},
        {"ph": "X", "cat": "kernel", "name": name, "pid": gpu, "tid": 7, "ts": at + 30, "dur": 9,
         "args": {"device": thread - 10, "stream": 7, **ids}},
    ]  # fmt: skip


def _launched_by(loaded: Trace) -> dict[str, str]:
    """The operator of each kernel; "" if it is unknown."""
    context, strings = Context(loaded), loaded.strings
    activity, ops = context.get(gpu), loaded.table("cpu_op")["name"]
    of = [strings[int(ops[op])] if op >= 0 else "" for op in activity.op.tolist()]
    return dict(zip([strings[name] for name in activity.name.tolist()], of, strict=True))


def test_ids_of_ranks_whose_pids_have_labels_are_apart() -> None:
    events = _rank("[TP00] 10", "[TP00] 0", 10, 1000, "mm") + _rank("[TP01] 11", "[TP01] 1", 11, 1500, "add")
    loaded = load_events(*events)
    assert _launched_by(loaded) == {"mm": "aten::mm", "add": "aten::add"}
    assert any("the traces of several ranks" in note for note in loaded.notes)
    assert json.loads(written(loaded))["traceEvents"] == events


def test_work_whose_id_calls_of_several_processes_have_belongs_to_none() -> None:
    events = _rank(10, 0, 10, 1000, "mm") + _rank(11, 1, 11, 1500, "add")
    loaded = load_events(*events)
    assert _launched_by(loaded) == {"mm": "", "add": ""}
    assert any("2 GPU activities have ids that calls of several processes share" in note for note in loaded.notes)
    assert json.loads(written(loaded))["traceEvents"] == events


def test_ids_of_one_process_are_as_in_the_file() -> None:
    loaded = load_events(*_rank(10, 0, 10, 1000, "mm"))
    assert _launched_by(loaded) == {"mm": "aten::mm"} and loaded.notes == ()
    assert loaded.table("kernel")["correlation"].tolist() == [7]
