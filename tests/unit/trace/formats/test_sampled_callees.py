"""Callees of sampled slices in files: they are readable there and read back."""

import json
from pathlib import Path

import pytest
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.trace import NO_ROW, Trace
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.sql.schema import MISSING
from support.trace_files.traces import trace

LINES, CALLEES = "77: 11 running; 76: 9 running", "77 pickle.dumps: 11 running; 76 .tolist: 9 running"
FRAME = {"start": 0, "duration": 100, "name": "a.py(1): main", "thread": 5, "parent": NO_ROW, "samples": 20}


def sampled() -> Trace:
    rows = [
        {**FRAME, "self_samples": 20, "running": 20, "lines": LINES, "callees": CALLEES},
        {**FRAME, "start": 200, "lines": "", "callees": ""},
    ]
    return trace({"python_function": rows}, sample_period_ns=10)


def told(read: Trace) -> list[str]:
    numbers = read.table("python_function")["callees"].tolist()
    return [read.strings[number] if number >= 0 else "" for number in numbers]


@pytest.mark.parametrize(("name", "kind"), [("a.json.gz", ""), ("a.pftrace", ""), ("stored", "store")])
def test_they_read_back_from_every_format(tmp_path: Path, name: str, kind: str) -> None:
    export_trace(sampled(), tmp_path / name, kind)
    assert told(open_trace(tmp_path / name)) == [CALLEES, ""]


def test_they_are_arguments_of_the_slices_that_have_them(tmp_path: Path) -> None:
    export_trace(sampled(), tmp_path / "a.json", "")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    with_callees, without = (row["args"] for row in events if row.get("cat") == "python_function")
    assert (with_callees["lines"], with_callees["callees"]) == (LINES, CALLEES)
    assert not {"lines", "callees"} & set(without)


def test_a_slice_without_them_has_none_in_sql() -> None:
    assert MISSING["callees"] == (-1,)
