"""Chrome traces of others through the store: nothing is lost. And the generator of large traces for benchmarks."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import export_trace, open_trace, save_trace
from kineto_trace.model.trace import Table, Trace
from support.trace_files import synthetic

Document = dict[str, Any]

ODD: Document = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8, "pg_config": [{"pg_name": "0"}]},
    "a note": "text with \u00e9 and \N{ROCKET}",
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 1.001, "dur": 5,
         "args": {"External id": 7, "Input Dims": [[2, 3], []], "Ev Idx": 0, "odd": None}},
        {"ph": "X", "cat": "Kernel", "name": "k", "pid": "GPU", "tid": "stream 7", "ts": 2, "dur": 0.5,
         "args": {"stream": 7, "correlation": 18446744073709551615, "est. achieved occupancy %": 0.25}},
        {"ph": "X", "name": "without a category", "pid": 1, "tid": 2, "ts": 3, "dur": 1},
        {"ph": "C", "name": "counter", "pid": 1, "ts": 4, "args": {"GPU 0": 3.5}},
        {"ph": "s", "id": 9, "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 2, "ts": 1.001},
        {"ph": "f", "id": "0x9", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 2, "bp": "e"},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main \"thread\""}},
        {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 2, "ts": 5,
         "args": {"Bytes": -512, "Addr": 139637976727552, "Device Type": 1, "Device Id": 0}},
    ],
    "traceName": "odd.json",
}  # fmt: skip


def same(left: Table, right: Table) -> None:
    for ours, theirs in ((left.columns, right.columns), (left.origin, right.origin)):
        assert list(ours) == list(theirs)
        for name, column in theirs.items():
            assert ours[name].dtype == column.dtype, name
            exact = column.dtype.kind != "f"
            assert np.array_equal(ours[name], column) if exact else np.array_equal(ours[name], column, equal_nan=True)


def events_of(document: Document) -> Counter[str]:
    return Counter(json.dumps(event, sort_keys=True) for event in document["traceEvents"])


def through_the_store(tmp_path: Path, text: str) -> tuple[Trace, Document]:
    """Opened again from the store, where all columns are as they were; and exported from there."""
    file = tmp_path / "trace.json"
    file.write_text(text)
    loaded = open_trace(file)
    stored = open_trace(save_trace(loaded, tmp_path / "trace.kineto"))
    assert (stored.head, stored.notes, stored.target) == (loaded.head, tuple(loaded.notes), loaded.target)
    assert (stored.window_start_ns, stored.window_end_ns) == (loaded.window_start_ns, loaded.window_end_ns)
    assert [dict(device) for device in stored.devices] == [dict(device) for device in loaded.devices]
    assert list(stored.tables) == list(loaded.tables)
    for kind, table in loaded.tables.items():
        same(stored.tables[kind], table)
    export_trace(stored, tmp_path / "out.json")
    exported: Document = json.loads((tmp_path / "out.json").read_text())
    return stored, exported


@pytest.mark.parametrize("document", [ODD, {**ODD, "traceEvents": []}], ids=["odd", "empty"])
def test_what_came_in_comes_out_of_the_store(tmp_path: Path, document: Document) -> None:
    _, exported = through_the_store(tmp_path, json.dumps(document))
    assert events_of(exported) == events_of(document)
    assert {name: value for name, value in exported.items() if name != "traceEvents"} == {
        name: value for name, value in document.items() if name != "traceEvents"
    }


def test_a_trace_as_kineto_writes_it_comes_out_of_the_store(tmp_path: Path) -> None:
    text = synthetic.text(1, layers=3)
    stored, exported = through_the_store(tmp_path, text)
    assert events_of(exported) == events_of(json.loads(text))
    assert stored.target.rank == 0


def test_synthetic_events_nest_and_kernels_of_a_stream_do_not_overlap() -> None:
    file = io.StringIO()
    count = synthetic.write(file, 3_000, rank=1, layers=3)
    document = json.loads(file.getvalue())
    assert len(document["traceEvents"]) == count
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "Trace":
            start = round(event["ts"] * 1_000)
            rows.setdefault((event["pid"], event["tid"]), []).append((start, start + round(event["dur"] * 1_000)))
    assert set(rows) == {(4242, 4242), (4242, 4300), (0, 7), (0, 20)}
    for (pid, _), spans in rows.items():
        open_ends: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or (pid and end <= open_ends[-1])
            open_ends.append(end)
    correlated = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    launches = {event["args"]["correlation"] for event in document["traceEvents"] if event.get("cat") == "cuda_runtime"}
    assert all(event["args"]["correlation"] in launches for event in correlated)
