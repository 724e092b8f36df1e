"""Perfetto traces, ours and other ones, back to tables."""

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.errors import FileError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.perfetto_proto import data, number, packet
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.trace import Losses, Table, Trace
from kineto_trace.open.raw_target import load_target
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.chrome_files import written as written_chrome
from support.trace_files.h200 import make_spool
from support.trace_files.perfetto_traces.samples import SMALL, foreign, written
from support.trace_files.traces import trace


def read(content: bytes) -> Trace:
    return load_perfetto(io.BytesIO(content), name="t.pftrace")


def rows(whole: Trace, kind: str) -> list[dict[str, Any]]:
    """The rows of a table by start, with texts for numbers; without what no file says."""
    table: Table = whole.table(kind)
    columns = {name: column.tolist() for name, column in table.columns.items() if name != "torch_thread"}
    for name in ("name", "inputs", "category"):
        if name in columns:
            columns[name] = [whole.strings[value] if value >= 0 else None for value in columns[name]]
    found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return sorted(found, key=lambda row: (row["start"], row["duration"], row["name"]))


def test_our_own_files_give_equal_tables() -> None:
    first = trace(SMALL)
    again = read(written(first))
    for kind in SMALL:
        assert rows(again, kind) == rows(first, kind)
    assert again.target == first.target
    assert (again.window_start_ns, again.window_end_ns) == (first.window_start_ns, first.window_end_ns)
    assert (again.losses, again.notes) == (first.losses, ())


def test_losses_are_counted_once_although_the_file_states_them_twice() -> None:
    lost = Losses(dropped=5, undecoded=3, torn=1, out_of_window=7)
    assert read(written(trace(SMALL, losses=lost))).losses == lost


def without_static(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels as Kineto shows them: with the sum of both kinds of shared memory."""
    for row in found:
        if "static_shared_memory" in row:
            row["dynamic_shared_memory"] += row.pop("static_shared_memory")
    return found


def test_a_recording_gives_equal_tables(tmp_path: Path) -> None:
    first = load_target(make_spool(tmp_path, "graph-cupti130001")).trace
    again = read(written(first))
    for kind in ("kernel", "cuda_runtime", "cuda_driver", "overhead"):
        assert without_static(rows(again, kind)) == without_static(rows(first, kind))
    assert np.count_nonzero(again.table("flow")["phase"] == ord("f")) == 400 + 10 + 10
    assert again.devices == first.devices


CHROME = """{"baseTimeNanoseconds": 1000000000000, "deviceProperties": [{"id": 0, "numSms": 132}], "odd": [1],
"traceEvents": [
{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":9,"tid":9,"ts":10,"dur":5.001,
 "args":{"External id":3,"Input Dims":[[2,3],[3,4]],"text":"[1]","flag":true,"nothing":null,"share":0.25}},
{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":9,"tid":9,"ts":11,"dur":1,"args":{"correlation":7}},
{"ph":"s","id":7,"pid":9,"tid":9,"ts":11,"cat":"ac2g","name":"ac2g"},
{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":20.5,"dur":2,
 "args":{"device":0,"stream":7,"correlation":7,"grid":[4,1,1],"est. achieved occupancy %":31}},
{"ph":"f","id":7,"pid":0,"tid":7,"ts":20.5,"cat":"ac2g","name":"ac2g","bp":"e"},
{"ph":"X","cat":"Trace","name":"window","pid":"Spans","tid":"all","ts":1,"dur":90},
{"ph":"B","cat":"mine","name":"begun","pid":9,"tid":10,"ts":30},
{"ph":"E","pid":9,"tid":10,"ts":34},
{"ph":"C","name":"queue","pid":9,"tid":9,"ts":12,"args":{"length":2}},
{"ph":"i","s":"g","name":"mark","pid":9,"tid":9,"ts":13},
{"ph":"M","name":"thread_name","pid":9,"tid":9,"ts":0,"args":{"name":"thread 9 (main)"}},
{"ph":"b","cat":"async","name":"a","id":1,"pid":9,"tid":9,"ts":14}
]}"""


def test_a_chrome_trace_comes_through_with_its_arguments_tracks_and_flows() -> None:
    first = load_chrome(io.BytesIO(CHROME.encode()))
    file = io.BytesIO()
    with TextSink(file) as sink:
        notes = write_perfetto(first, sink)
    again = read(file.getvalue())
    assert notes == ("kept in the file, but not shown by viewers: 1 event of the phases b",)
    for kind in ("cpu_op", "cuda_runtime", "kernel"):
        for name in ("start", "duration", "thread" if kind != "kernel" else "stream"):
            assert again.table(kind)[name].tolist() == first.table(kind)[name].tolist()
    assert again.head == first.head
    inputs = again.strings[again.table("cpu_op")["inputs"][0]]
    assert inputs == '"Input Dims":[[2, 3], [3, 4]],"text":"[1]","flag":true,"nothing":null,"share":0.25'
    assert again.strings[again.table("kernel").origin["args"][0]] == '"est. achieved occupancy %":31'
    assert again.table("kernel")["grid_x"].tolist() == [4]
    flows = [(chr(row["phase"]), row["start"] - 10**12) for row in rows(again, "flow")]
    assert flows == [("s", 11_000), ("f", 20_500)]
    other = [(row["name"], chr(row["phase"]), row["start"] - 10**12, row["duration"]) for row in rows(again, "other")]
    assert {
        ("window", "X", 1_000, 90_000),
        ("queue", "C", 12_000, 0),
        ("mark", "i", 13_000, 0),
        ("begun", "X", 30_000, 4_000),
    } <= set(other)


def test_track_events_of_other_programs_are_read_with_a_note() -> None:
    found = read(foreign())
    op = found.table("cpu_op")
    assert (op["start"].tolist(), op["duration"].tolist(), op["thread"].tolist()) == ([1_000], [2_000], [41])
    assert found.strings[op["inputs"][0]] == '"where":{"rank":3,"on":true},"sizes":[1,18446744073709551615]'
    assert [row["name"] for row in rows(found, "other")] == ["mark", "thread_name"]
    assert found.notes == (
        "the Perfetto trace was written by another program: its times are on the clock of its track events",
    )


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (packet(number(8, 5)), "cannot read .*t.pftrace: it has 1 packet, but no track event"),
        (b"\x0a", "it has 0 packets, but no track event"),
        (b"", "it has 0 packets, but no track event"),
    ],
)
def test_files_without_track_events_are_refused(content: bytes, error: str) -> None:
    with pytest.raises(FileError, match=error):
        read(content)


def test_what_a_cut_off_file_lacks_is_told() -> None:
    content = foreign()
    last = content.rindex(b"\x0a")  # the last packet
    found = read(content[:-3])
    assert found.table("cpu_op")["duration"].tolist() == [500]
    assert found.notes[:2] == (
        f"the file is truncated in the middle of a packet, at byte {last}",
        "slices without an end in the file, shown up to the last event: 1",
    )


def test_what_comes_behind_damage_is_told() -> None:
    content = foreign()
    found = read(content + b"\xff" + content)
    assert found.notes[0] == f"the file is damaged at byte {len(content)}: the rest was not read"
    assert len(found.table("cpu_op")) == 1


def test_ends_without_beginning_and_lost_names_are_counted() -> None:
    end = packet(number(8, 900), number(10, 1), data(11, number(9, 2) + number(11, 5)))
    nameless = packet(number(8, 9_000), number(10, 1), data(11, number(9, 3) + number(11, 5) + number(10, 77)))
    found = read(end + foreign() + nameless)
    assert found.notes[:2] == (
        "slice ends without a beginning in the file, left out: 1",
        "names or times that refer to data missing from the file, shown as ?: 1",
    )
    assert rows(found, "other")[-1]["name"] == "?"


def test_a_compressed_file_is_read_and_a_cut_off_one_told(tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace.gz"
    path.write_bytes(gzip.compress(written(trace(SMALL))))
    assert rows(open_trace(path), "kernel") == rows(trace(SMALL), "kernel")
    path.write_bytes(gzip.compress(foreign())[:-12])
    found = open_trace(path)
    assert (found.notes[0], len(found.table("cpu_op"))) == ("the compressed file is truncated", 1)


@given(st.integers(0, 2**32))
def test_no_bytes_make_the_reader_fail_otherwise_than_by_a_clear_error(seed: int) -> None:
    chance = random.Random(seed)
    content = bytearray(foreign() + OURS)
    for _ in range(chance.randrange(1, 12)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    cut = content[: chance.randrange(len(content))] if chance.random() < 0.3 else content
    try:
        read(bytes(cut))
    except FileError as exc:
        assert "t.pftrace" in str(exc)


OURS = written(trace(SMALL))


def test_names_of_processes_threads_and_streams_of_a_recording_come_back(tmp_path: Path) -> None:
    again = read(written(load_target(make_spool(tmp_path, "graph-cupti130001")).trace))
    named = {row["args"]["name"] for row in metadata_of(again, "process_name", "thread_name")}
    assert {"python3", "MainThread", "Device 0", "stream 7"} <= named
    labels = [(row["pid"], row["args"]["labels"]) for row in metadata_of(again, "process_labels")]
    assert labels.count((0, "GPU 0")) == 1


def metadata_of(trace: Trace, *names: str) -> list[dict[str, Any]]:
    """The metadata rows of these names, as a Chrome trace has them."""
    events = json.loads(written_chrome(trace))["traceEvents"]
    return [event for event in events if event["ph"] == "M" and event["name"] in names]
