import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import unpacked
from kineto_trace.formats.perfetto_proto import rows_packet
from kineto_trace.formats.trace_export import export_trace
from support.trace_files.chrome_files import event, load_events, written

FLOW = {"pid": 1, "tid": 2, "cat": "ac2g", "name": "launch"}
ROWS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 7}},
    {"ph": "M", "name": "process_labels", "pid": 3, "tid": 0, "args": {"labels": "GPU 3"}},
    {"ph": "s", **FLOW, "ts": 10.5, "id": "text"},
    {"ph": "f", **FLOW, "ts": 90, "id": 8, "bp": "e"},
    {"ph": "b", "cat": "async", "name": "a", "id": 1, "pid": 1, "tid": 2, "ts": 14},
    {"ph": "E", "pid": 1, "tid": 2, "ts": 15},
]


def path_of(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "trace.pftrace"
    export_trace(load_events(*events), path)
    return path


def test_rows_without_a_form_in_the_format_come_back(tmp_path: Path) -> None:
    again = json.loads(written(load_perfetto(path_of(tmp_path, event("cpu_op", "op", 10, 5), *ROWS))))["traceEvents"]
    assert sorted(again[1:], key=str) == sorted(ROWS, key=str)
    assert again[0]["name"] == "op"


def test_arrows_that_were_drawn_for_the_viewer_are_not_in_the_trace(tmp_path: Path) -> None:
    call = event("cuda_runtime", "cudaLaunchKernel", 10, 5, args={"correlation": 7})
    work = event("kernel", "k", 20, 5, args={"correlation": 7, "device": 0, "stream": 1})
    path = tmp_path / "trace.pftrace"
    told = export_trace(load_events(call, work), path)
    assert told.notes == ("the file has no arrows; 1 were added from correlation and sequence numbers",)
    assert len(load_perfetto(path).table("flow")) == 0


def test_damaged_rows_are_told(tmp_path: Path) -> None:
    path = path_of(tmp_path, event("cpu_op", "op", 10, 5))
    path.write_bytes(path.read_bytes() + rows_packet(b"no zlib") + rows_packet(zlib.compress(b'{"ph":"M"}')))
    trace = load_perfetto(path)
    assert len(trace.table("other")) == 1
    assert any("damaged and were not read" in note for note in trace.notes)


def test_unpacking_takes_little_memory_at_a_time() -> None:
    pieces = list(unpacked(zlib.compress(bytes(5 << 20))))
    assert sum(map(len, pieces)) == 5 << 20
    assert max(map(len, pieces)) <= 1 << 20


def test_a_block_that_is_cut_off_gives_what_it_has() -> None:
    block = zlib.compress(b"abc" * 1000, 0)
    assert b"".join(unpacked(block[:500])).startswith(b"abc")


def test_a_damaged_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="header"):
        list(unpacked(b"no zlib"))


def test_counters_of_several_numbers_come_back_as_the_events_that_they_were(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [
        {"ph": "C", "name": "read", "pid": 1, "tid": 0, "ts": ts, "args": {"value": ts, "acc_id": number}}
        for ts in (10, 20)
        for number in (0, 1)
    ]
    samples.append({"ph": "C", "name": "power", "pid": 1, "tid": 0, "ts": 10, "args": {"W": 7}})
    samples.append({"ph": "C", "name": "state", "pid": 1, "tid": 0, "ts": 10, "args": {"text": "on"}})
    path = path_of(tmp_path, event("cpu_op", "op", 10, 5), *samples)
    again = [row for row in json.loads(written(load_perfetto(path)))["traceEvents"] if row["ph"] == "C"]
    assert sorted(again, key=str) == sorted(samples, key=str)
