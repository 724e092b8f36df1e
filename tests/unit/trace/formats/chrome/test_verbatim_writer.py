import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.arrays.codec import END, OPTIONAL, SIGNED, TEXT, UNSIGNED, Field, MixedWriter, PreparedTexts
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.chrome.verbatim_writer import folded
from kineto_trace.formats.text_sinks import GzipSink
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.trace_files.chrome_files import back, document, event, load, load_events, written
from support.trace_files.h200 import recording

WORKLOADS = ("mlp", "graph", "streams")
NAMES = PreparedTexts([b'"a"', b"", b'"ccc"'])
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_kinetos_own_traces_come_back_event_by_event(workload: str) -> None:
    kineto = recording(f"{workload}-cupti130001").kineto
    assert back(json.dumps(kineto)) == kineto


def test_stored_columns_give_the_same_bytes(tmp_path: Path) -> None:
    trace = load(json.dumps(recording("mlp-cupti130001").kineto))
    save_columns(trace, tmp_path / "columns")
    assert written(load_columns(tmp_path / "columns")) == written(trace)


def test_two_writings_are_the_same_bytes_compressed_too() -> None:
    def packed() -> bytes:
        out = io.BytesIO()
        with GzipSink(out) as sink:
            write_chrome(trace, sink, trace_name="unused")
        return out.getvalue()

    trace = load_events(*(event("cpu_op", f"op {n}", n, 1) for n in range(100)))
    assert packed() == packed()
    assert gzip.decompress(packed()) == written(trace) == written(trace)


def test_the_bytes_are_these() -> None:
    rows = (
        event("kernel", "k", 1.5, 2, args={"stream": 7, "grid": [1, 2, 3], "x": [None]}),
        {"ph": "f", "id": "0x1", "pid": "p", "tid": 7, "ts": -1.25, "cat": "ac2g", "name": 'a"', "bp": "e"},
        {"ph": "i", "name": "[memory]", "s": "t", "pid": 1, "tid": 2, "ts": 0.1234, "args": {}, "sf": 3},
    )
    assert written(load(document(*rows, traceName="t"))).decode() == (
        '{\n"baseTimeNanoseconds": 1790857026000000000,\n"traceEvents": [\n'
        '{"ph":"X","cat":"kernel","name":"k","pid":1,"tid":2,"ts":1.500,"dur":2,'
        '"args":{"stream":7,"grid":[1,2,3],"x": [null]}},\n'
        '{"ph":"f","cat":"ac2g","name":"a\\"","pid":"p","tid":7,"ts":-1.250,"id":"0x1","bp":"e"},\n'
        '{"ph":"i","name":"[memory]","pid":1,"tid":2,"ts":0.1234,"s":"t","args":{},"sf": 3}\n'
        '],\n"traceName": "t"\n}\n'
    )


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"ph": 1},
        {"ph": "XX", "cat": None, "name": 5},
        {"ph": "X", "cat": "kernel", "name": "no times"},
        event("kernel", "k", 1, 1, pid=2**63, tid=-(2**62)),
        event("kernel", "k", 1, 1, pid=1.0, tid=None),
        event("kernel", "k", 10**30, 1e-9),
        event("kernel", "\ud800 half", 1, 1, tid="\ud800"),
        event("kernel", "k", 1, 1, args={"stream": 2**32, "grid": [1, 2, 2**31], "device": -1, "priority": 1.0}),
        event("kernel", "k", 1, 1, args={"External id": 2**63, "external id": 5, "queued": 2**64}),
        event("kernel", "k", 1, 1, args=None),
        event("cpu_op", "o", 1, 1, args={"finished": False, "Ev Idx": "7", "Sequence number": True}),
        event("cpu_op", "o", 1, 1, args={"External id": -1, "Input Dims": [[], [2, 3]], "": {"": []}}),
        event("python_function", "p", 1, 1, args={"Python id": 0, "Python parent id": None}),
        event("gpu_memcpy", "m", 1, 1, args={"memory bandwidth (GB/s)": 12, "bytes": 0.5}),
        event("gpu_memcpy", "m", 1, 1, args={"memory bandwidth (GB/s)": 54.229209764170456}),
        event("gpu_memcpy", "m", 1, 1, args={"memory bandwidth (GB/s)": 1.7976931348623157e308}),
        event("gpu_memcpy", "m", 1, 1, args={"memory bandwidth (GB/s)": 5e-324}),
        {"ph": "b", "cat": "async", "id": 2**64, "id2": {"local": 1}, "ts": 1},
        {"ph": "C", "name": "GPU util", "pid": "GPU 0 Counters", "ts": 5, "args": {"": 7.25}},
    ],
)
def test_odd_rows_come_back(row: dict[str, Any]) -> None:
    rows = [{"ph": "M"}, row, row]
    assert back(json.dumps(rows))["traceEvents"] == rows


@pytest.mark.parametrize(
    "text",
    [
        '{"ph":"X","name":"first","name":"last","ts":1,"ts":2,"cat":"kernel","dur":1,"cat":"x"}',
        '{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{"stream":1,"stream":2,"device":"x","device":3}}',
        '{"args":{"stream":1},"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{"stream":2},"ph":"i"}',
        '{"n\\u0061me":"x","ph":"X" , "na\\"me" :[ 1 , 2 ], "ts":1e3}',
    ],
)
def test_of_members_that_come_twice_the_last_counts(text: str) -> None:
    assert back(f"[{text}]")["traceEvents"] == [json.loads(text)]


def test_an_empty_trace_comes_back() -> None:
    assert back('{"a":[1],"traceEvents":[]}') == {"a": [1], "traceEvents": []}


def column(kind: str, *values: int) -> npt.NDArray[Any]:
    return np.array(values, np.int64).astype(kind)


def text(fields: list[Field], rows: list[int]) -> bytes:
    out = np.empty(1 << 16, np.uint8)
    form, row = np.zeros(len(rows), np.uint32), np.array(rows, np.uint32)
    done, size = MixedWriter([fields], form, row).write(out, 0, len(rows))
    assert done == len(rows)
    return out[:size].tobytes()


def test_values_that_do_not_vary_join_the_literals() -> None:
    fields = [
        Field(b'{"cat":', TEXT, column("int32", 2, 2), NAMES),
        Field(b',"pid":', SIGNED, column("int64", -4, -4)),
        Field(b',"tid":', SIGNED, column("int64", 5, 6)),
        Field(b',"device":', UNSIGNED, column("uint8", 0, 0)),
        Field(b"}"),
    ]
    found = folded(fields)
    assert [(field.literal, field.operation) for field in found] == [
        (b'{"cat":"ccc","pid":-4,"tid":', SIGNED),
        (b',"device":0}', END),
    ]
    assert text(found, [1, 0]) == text(fields, [1, 0])


def test_only_the_rows_that_are_written_count() -> None:
    fields = [Field(b"x", SIGNED, column("int64", 1, 2, 1)), Field(b"\n")]
    assert [field.literal for field in folded(fields, np.array([0, 2]))] == [b"x1\n"]
    assert len(folded(fields, np.array([0, 1]))) == 2
    assert len(folded(fields, np.array([], np.int64))) == 2


def test_what_may_be_left_out_stays_a_field() -> None:
    fields = [Field(b"x", OPTIONAL, column("int64", 7, 7), base=7), Field(b"\n")]
    assert len(folded(fields)) == 2


@given(st.data())
def test_the_text_is_the_same(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 5))
    fields = []
    for _ in range(data.draw(st.integers(0, 4))):
        operation = data.draw(st.sampled_from([SIGNED, UNSIGNED, TEXT]))
        numbers = st.integers(-1, 3) if operation == TEXT else st.sampled_from([0, 1, -1, -(2**63), 2**63 - 1])
        values = data.draw(st.lists(numbers, min_size=length, max_size=length))
        if data.draw(st.booleans()):
            values = values[:1] * length
        kind = data.draw(st.sampled_from(TYPES if operation != TEXT else TYPES[4:6]))
        fields.append(Field(data.draw(st.binary(max_size=40)), operation, column(kind, *values), NAMES))
    fields.append(Field(b"\n"))
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    assert text(folded(fields), rows) == text(fields, rows)
    assert text(folded(fields, np.array(rows)), rows) == text(fields, rows)


@pytest.mark.parametrize("fields", [[], [Field(b"}")]])
def test_forms_without_values_stay(fields: list[Field]) -> None:
    assert folded(fields) == fields
