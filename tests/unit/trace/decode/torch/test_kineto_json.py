import json
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.torch import kineto_json, kineto_text
from kineto_trace.decode.torch.kineto_json import flops, nanoseconds
from kineto_trace.model.trace import NO_ROW, NO_STRING, StringTable, Table
from kineto_trace.spool.raw_records import Chunk, RawSource
from pytest import MonkeyPatch

BASE = 1_790_857_026_000_000_000
OP_ARGS = '"External id": 6,"Sequence number": 7, "Fwd thread id": 0, "Record function id": 0, "Ev Idx": 5'


def row(cat: str, name: str, ts: str, dur: str, args: str, tid: int = 42) -> str:
    return with_args(cat, name, ts, dur, f"{{\n      {args}\n    }}", tid=tid)


def with_args(cat: str, name: str, ts: str, dur: str, args: str, pid: int = 41, tid: int = 42) -> str:
    """As Kineto writes it, byte for byte."""
    return (
        f'  {{\n    "ph": "X",\n    "cat": "{cat}",\n    "name": "{name}",\n    "pid": {pid},\n    "tid": {tid},\n'
        f'    "ts": {ts},\n    "dur": {dur}\n    ,\n    "args": {args}\n  }}'
    )


def arrow(ph: str, number: int, tid: int, ts: str) -> str:
    end = '"bp": "e"' if ph == "f" else ""
    return (
        f'  {{\n    "ph": "{ph}",\n    "id": {number},\n    "pid": 41,\n    "tid": {tid},\n    "ts": {ts},\n'
        f'    "cat": "fwdbwd",\n    "name": "fwdbwd"{"," if end else ""}\n    {end}\n  }}'
    )


def document(*rows: str, devices: str = "[]") -> bytes:
    head = (
        f'\x1e\n{{\n    "schemaVersion": 1,\n    "deviceProperties": {devices},\n    "baseTimeNanoseconds": {BASE},\n'
    )
    head += '    "traceEvents": [\n    \n'
    return (head + ",\n".join(rows) + '\n  ],"traceName": "/tmp/x/torch.json" }').encode()


def source(data: bytes, buffer_bytes: int = 100, **metadata: Any) -> RawSource:
    chunks = [
        Chunk(sequence=at, records=1, offset=at, size=min(buffer_bytes, len(data) - at))
        for at in range(0, len(data), buffer_bytes)
    ]
    return RawSource(
        source="torch_ops", format="kineto_json/1", metadata=metadata, record_bytes={}, records=len(chunks), dropped=0,
        data=memoryview(data), chunks=tuple(chunks), strings={}, torn=0,
    )  # fmt: skip


def decode(data: bytes, **metadata: Any) -> tuple[Decoded, list[str]]:
    strings = StringTable()
    trace = kineto_json.decode(source(data, **metadata), strings)
    return trace, strings.strings


def names(table: Table, strings: list[str]) -> list[str]:
    return [strings[number] for number in table["name"].tolist()]


def test_an_op_has_its_times_thread_number_and_sequence() -> None:
    trace, strings = decode(document(row("cpu_op", "aten::t", "4334617503433.566", "99.177", OP_ARGS)))
    ops = trace.tables["cpu_op"]
    assert {name: column.tolist() for name, column in ops.columns.items()} == {
        "start": [BASE + 4334617503433566],
        "duration": [99177],
        "name": [strings.index("aten::t")],
        "thread": [42],
        "id": [1],
        "sequence": [7],
        "torch_thread": [0],
        "forward_thread": [0],
        "scope": [0],
        "finished": [1],
        "inputs": [NO_STRING],
    }
    assert (trace.records, trace.undecoded, trace.warnings) == (1, 0, ())


def test_every_further_argument_stays_as_it_was_written() -> None:
    further = '"Collective name": "allreduce", "Input Dims": [[2, 8], []], "Call stack": "a;b;"'
    data = document(
        row("cpu_op", "a", "1.000", "1.000", '"External id": 1,' + further + ', "Ev Idx": 5'),
        row("user_annotation", "b", "2.000", "1.000", '"External id": 2,"Record function id": 17, "finished": false'),
    )
    trace, strings = decode(data)
    op, annotation = trace.tables["cpu_op"], trace.tables["user_annotation"]
    assert strings[op["inputs"][0]] == further
    assert strings[annotation["inputs"][0]] == '"Record function id": 17'
    assert (annotation["finished"][0], annotation["scope"][0], annotation["id"][0]) == (0, 7, 2)


def test_times_are_exact_for_all_that_kineto_can_write() -> None:
    numbers = random.Random(1)
    exact = [numbers.randrange(7_889_238 * 10**9) for _ in range(100_000)]
    written = [f"{ns // 1000}.{ns % 1000:03d}" for ns in exact]
    assert nanoseconds(np.array([float(text) for text in written])).tolist() == exact
    assert [int(Decimal(text) * 1000) for text in written[:10]] == exact[:10]


def test_rows_in_many_small_blocks_are_those_in_one(monkeypatch: MonkeyPatch) -> None:
    rows = [row("cpu_op", f"op {number}", f"{number}.500", "0.001", OP_ARGS) for number in range(300)]
    whole, strings = decode(document(*rows))
    monkeypatch.setattr(kineto_text, "BLOCK_BYTES", 1000)
    blocks, strings_of_blocks = decode(document(*rows))
    assert names(blocks.tables["cpu_op"], strings_of_blocks) == names(whole.tables["cpu_op"], strings)
    assert whole.tables["cpu_op"]["start"].tolist() == [BASE + n * 1000 + 500 for n in range(300)]


def test_a_name_with_bare_quotes_is_read() -> None:
    rows = [
        row("cpu_op", "aten::t", "1.000", "1.000", OP_ARGS),
        row("user_annotation", 'a "b"', "2.000", "1.0", OP_ARGS),
    ]
    trace, strings = decode(document(*rows))
    assert names(trace.tables["user_annotation"], strings) == ['a "b"']
    assert (len(trace.tables["cpu_op"]), trace.undecoded, trace.warnings) == (1, 0, ())


def test_an_op_whose_arguments_cannot_be_read_keeps_name_and_times() -> None:
    trace, strings = decode(document(row("cpu_op", "a", "1.000", "1.000", '"Concrete Inputs": ["say "x""]')))
    assert names(trace.tables["cpu_op"], strings) == ["a"]
    assert trace.undecoded == 0
    assert trace.warnings == ("1 op has no arguments: torch's profiler wrote invalid JSON there",)


def test_a_row_that_cannot_be_read_is_counted_and_costs_no_other() -> None:
    rows = [row("cpu_op", str(number), f"{number}.000", "1.000", OP_ARGS) for number in range(200)]
    rows[100] = rows[100].replace('"ts": ', '"ts": oh')
    trace, strings = decode(document(*rows))
    assert names(trace.tables["cpu_op"], strings) == [str(number) for number in range(200) if number != 100]
    assert trace.undecoded == 1


def test_a_document_that_is_cut_gives_what_is_there() -> None:
    whole = document(*(row("cpu_op", str(number), f"{number}.000", "1.000", OP_ARGS) for number in range(3)))
    cut = whole[: whole.index(b'"name": "2"')]
    trace, strings = decode(cut)
    assert names(trace.tables["cpu_op"], strings) == ["0", "1"]
    assert trace.undecoded == 1
    assert trace.warnings == ("1 trace from torch's profiler is truncated",)


def test_what_is_no_trace_at_all_is_counted() -> None:
    trace, _ = decode(b"\x1ewhat is this")
    assert (len(trace.tables["cpu_op"]), trace.undecoded) == (0, 1)


def test_nothing_gives_empty_tables() -> None:
    trace, _ = decode(b"")
    assert {kind: len(table) for kind, table in trace.tables.items()} == {
        "cpu_op": 0,
        "user_annotation": 0,
        "python_function": 0,
    }
    assert (trace.undecoded, trace.warnings) == (0, ())


def test_several_documents_become_one_numbered_by_start() -> None:
    data = document(row("cpu_op", "late", "9.000", "1.000", OP_ARGS)) + document(
        row("cpu_op", "early", "1.000", "1.000", OP_ARGS), row("cpu_op", "outer", "1.000", "5.000", OP_ARGS)
    )
    trace, strings = decode(data)
    ops = trace.tables["cpu_op"]
    assert list(zip(names(ops, strings), ops["id"].tolist(), strict=True)) == [("outer", 1), ("early", 2), ("late", 3)]


def test_a_compact_document_of_another_writer_is_read() -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 3.25, "dur": 1, "args": {}}
    data = json.dumps({"traceEvents": [event, event], "baseTimeNanoseconds": 1000}, separators=(",", ":"))
    trace, _ = decode(b"\x1e" + data.encode())
    assert trace.tables["cpu_op"]["start"].tolist() == [4250, 4250]
    assert trace.warnings == ()


def test_arrows_tell_which_thread_torch_means() -> None:
    backward = '"External id": 2,"Record function id": 0, "Sequence number": 7, "Fwd thread id": 3, "Ev Idx": 5'
    data = document(
        row("cpu_op", "forward", "1.000", "1.000", OP_ARGS, tid=42),
        arrow("s", 1, 42, "1.000"),
        row("cpu_op", "backward", "5.001", "1.000", backward, tid=43),
        arrow("f", 1, 43, "5.001"),
        row("cpu_op", "other", "6.000", "1.000", OP_ARGS, tid=42),
    )
    ops = decode(data)[0].tables["cpu_op"]
    assert ops["torch_thread"].tolist() == [3, 0, 3]
    assert ops["forward_thread"].tolist() == [0, 3, 0]
    assert ops["scope"].tolist() == [0, 1, 0]


def call(name: str, number: int, parent: str, module: str = "") -> str:
    return row(
        "python_function", name, f"{number}.000", "1.000",
        f'"Python parent id": {parent}, "Python id": {number}{module}, "Ev Idx": {number}',
    )  # fmt: skip


CALLS = (
    call("a.py(1): main", 1, "null"),
    call("nn.Module: Net_0", 2, "1", ', "Python module id": 0'),
    call("b.py(2): forward", 3, "2"),
    call("nn.Module: Linear_1", 4, "3", ', "Python module id": 1'),
)


def test_python_calls_know_their_callers_and_modules() -> None:
    trace, strings = decode(document(*CALLS) + document(*CALLS), python_rows="all")
    calls = trace.tables["python_function"]
    assert names(calls, strings)[:4] == ["a.py(1): main", "nn.Module: Net_0", "b.py(2): forward", "nn.Module: Linear_1"]
    assert calls["parent"].tolist() == [NO_ROW, 0, 1, 2, NO_ROW, 4, 5, 6]
    assert calls["depth"].tolist() == [0, 1, 2, 3] * 2
    assert calls["module"].tolist() == [-1, 0, -1, 1] * 2
    assert calls["samples"].tolist() == [0] * 8


def test_where_only_modules_are_wanted_a_call_stands_under_the_next_module() -> None:
    trace, strings = decode(document(*CALLS) + document(*CALLS), python_rows="modules")
    calls = trace.tables["python_function"]
    assert names(calls, strings) == ["nn.Module: Net_0", "nn.Module: Linear_1"] * 2
    assert calls["parent"].tolist() == [NO_ROW, 0, NO_ROW, 2]
    assert calls["depth"].tolist() == [0, 1, 0, 1]


def test_callers_that_go_in_a_circle_or_are_missing_end_the_chain() -> None:
    trace, _ = decode(document(call("a", 1, "2"), call("b", 2, "1"), call("c", 3, "99")))
    calls = trace.tables["python_function"]
    assert calls["parent"].tolist() == [NO_ROW] * 3
    assert calls["depth"].tolist() == [0, 0, 0]


def test_rows_of_other_kinds_are_named() -> None:
    trace, _ = decode(document(row("cuda_sync", "Stream Sync", "1.000", "1.000", '"cbid": 1')))
    assert trace.warnings == (
        "left out rows of torch's profiler that are not operators, annotations or Python calls: 1 cuda_sync",
    )


def test_only_wanted_tables_are_given() -> None:
    trace, _ = decode(document(row("cpu_op", "a", "1.000", "1.000", OP_ARGS)), activity_types=["cpu_op"])
    assert sorted(trace.tables) == ["cpu_op", "python_function"]


def test_flops_are_added_where_torch_computes_them() -> None:
    inputs = '"Input Dims": [[8], [2, 4], [4, 8]], "Concrete Inputs": ["", "", ""]'
    trace, strings = decode(document(row("cpu_op", "aten::addmm", "1.000", "1.000", inputs)), flops=True)
    assert strings[trace.tables["cpu_op"]["inputs"][0]] == inputs + ', "flops": 128'


def test_flops_of_a_convolution_and_of_what_is_not_known() -> None:
    dims = '"Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3], [4], [], [], [], []]'
    concrete = '"Concrete Inputs": ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]'
    assert flops("aten::conv2d", f"{dims}, {concrete}") == 2 * 2 * 8 * 8 * 9 * 3 * 4
    assert flops("aten::relu", f"{dims}, {concrete}") == 0
    assert flops("aten::mm", '"Input Dims": [[2]], "Concrete Inputs": []') == 0


# ------------------------------------------------------------ rows of devices


def device_row(cat: str, name: str, ts: float, args: Any, **place: int) -> str:
    """Of 2.5 us, with any text as its arguments."""
    return with_args(cat, name, str(ts), "2.500", args if isinstance(args, str) else json.dumps(args), **place)


def columns(trace: Decoded, kind: str, *names: str) -> list[tuple[Any, ...]]:
    table = trace.tables[kind]
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def test_a_kernel_has_its_times_place_shape_and_operator() -> None:
    shape = {"grid": [4, 2, 1], "block": [32, 1, 1], "device": 1, "stream": 7, "correlation": 9, "External id": 6}
    data = document(
        device_row("cpu_op", "npu::gemm", 1.0, {"External id": 6}),
        device_row("kernel", "gemm", 3.25, shape, pid=1, tid=3),
        device_row("privateuse1_runtime", "npuLaunch", 2.0, {"correlation": 9}),
    )
    trace, strings = decode(data)
    assert columns(trace, "kernel", "start", "duration", "device", "stream", "correlation", "grid_x", "block_x") == [
        (BASE + 3250, 2500, 1, 7, 9, 4, 32)
    ]
    assert columns(trace, "kernel", "external_id") == columns(trace, "cpu_op", "id") == [(1,)]
    assert columns(trace, "cuda_runtime", "start", "thread", "correlation") == [(BASE + 2000, 42, 9)]
    assert [strings[number] for (number,) in columns(trace, "kernel", "name")] == ["gemm"]
    assert trace.categories == {"cuda_runtime": "privateuse1_runtime"}
    assert (trace.records, trace.undecoded, trace.warnings) == (3, 0, ())


def test_a_row_without_a_device_and_stream_has_those_of_its_track() -> None:
    trace, _ = decode(document(device_row("gpu_memcpy", "copy", 1.0, {"bytes": 4096}, pid=2, tid=5)))
    assert columns(trace, "gpu_memcpy", "device", "stream", "bytes") == [(2, 5, 4096)]


@pytest.mark.parametrize(
    "args",
    [
        {"device": "x", "correlation": -1, "grid": [1, 2], "stream": 1 << 40, "External id": 2**80},
        {"grid": "[4, 2, 1]", "block": [1.5, 2, 3], "correlation": None, "queued": -3},
        '{"correlation": nan}',
    ],
)
def test_arguments_of_another_kind_are_left_out(args: Any) -> None:
    trace, _ = decode(document(device_row("kernel", "gemm", 1.0, args)))
    assert columns(trace, "kernel", "duration", "correlation", "grid_x", "block_x", "queued") == [(2500, 0, 0, 0, 0)]


def test_numbers_of_operators_are_those_of_their_own_document() -> None:
    one = document(
        device_row("cpu_op", "first", 1.0, {"External id": 3}), device_row("kernel", "a", 2.0, {"External id": 3})
    )
    two = document(
        device_row("cpu_op", "second", 9.0, {"External id": 3}), device_row("kernel", "b", 10.0, {"External id": 3})
    )
    trace, _ = decode(one + two)
    assert columns(trace, "kernel", "external_id") == [(1,), (2,)]


def test_only_the_wanted_categories_are_kept() -> None:
    data = document(device_row("kernel", "a", 1.0, {}), device_row("privateuse1_runtime", "b", 1.0, {}))
    trace, _ = decode(data, activity_types=["kernel"])
    assert (len(trace.tables["kernel"]), "cuda_runtime" in trace.tables) == (1, False)
    assert trace.warnings == ()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ('[{"id": 0, "name": "Acme A1", "numSms": 8}]', [{"id": 0, "name": "Acme A1", "numSms": 8}]),
        ('[{"id": 3, "name": "other"}]', [{"id": 0, "name": "acme"}, {"id": 3, "name": "other"}]),
        ("[[]", [{"id": 0, "name": "acme"}]),
        ('"[" * 9', [{"id": 0, "name": "acme"}]),
    ],
)
def test_devices_are_as_their_profiler_tells_or_named_after_the_accelerator(
    devices: str, expected: list[dict[str, Any]]
) -> None:
    trace, _ = decode(document(device_row("kernel", "a", 1.0, {}, pid=0), devices=devices), accelerator="acme")
    assert trace.metadata == {"devices": expected}


def test_a_row_that_is_nested_too_deeply_loses_its_arguments_alone() -> None:
    deep = row("cpu_op", "deep", "2.000", "1.000", f'"x": {"[" * 100_000}{"]" * 100_000}')
    found, strings = decode(document(row("cpu_op", "plain", "1.000", "1.000", OP_ARGS), deep))
    assert sorted(strings[number] for number in found.tables["cpu_op"]["name"].tolist()) == ["deep", "plain"]
    assert [warning for warning in found.warnings if "1 op has no arguments" in warning]
