import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.shared.text_sinks import GzipSink
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.trace_files.chrome_files import back, document, event, load, load_events, written
from support.trace_files.h200 import recording

WORKLOADS = ("mlp", "graph", "streams")


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
