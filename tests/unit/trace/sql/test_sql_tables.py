"""Traces as tables of SQL: what is in them, worked out by hand."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kineto_trace.model.activity_tables import NO_PRIORITY
from kineto_trace.model.context import Context
from kineto_trace.model.trace import SCHEMAS
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.sql import Database, find_table, sql_tables
from kineto_trace.sql.arrow_tables import SqlSource
from support.counters.trace_samples import NAN, sample, through
from support.trace_files.traces import START_NS, trace

ROWS = {
    "kernel": [
        {"name": "gemm", "start": 100, "duration": 50, "correlation": 7, "stream": 13, "priority": -5},
        {"name": "relu", "start": 160, "duration": 5, "correlation": 8, "stream": 13, "priority": NO_PRIORITY},
    ],
    "cuda_runtime": [
        {"name": "cudaLaunchKernel", "start": 20, "duration": 5, "correlation": 7, "thread": 1},
        {"name": "cudaLaunchKernel", "start": 70, "duration": 5, "correlation": 8, "thread": 1},
    ],
    "cpu_op": [
        {"name": "aten::linear", "start": 10, "duration": 40, "id": 1, "thread": 1, "inputs": -1, "finished": 1},
        {"name": "aten::addmm", "start": 15, "duration": 15, "id": 2, "thread": 1, "inputs": -1, "finished": 1},
    ],
    "overhead": [{"name": "Buffer Flush", "start": 300, "duration": 2}],
}


@pytest.fixture(scope="module")
def one() -> Iterator[Database]:
    with Database([SqlSource("a.json", Context(trace(ROWS)))]) as database:
        yield database


@pytest.fixture(scope="module")
def two() -> Iterator[Database]:
    sources = [SqlSource(f"rank{rank}.json", Context(trace(ROWS), rank=rank)) for rank in (0, 3)]
    with Database(sources) as database:
        yield database


def test_times_are_unix_ns_and_names_are_texts(one: Database) -> None:
    (row,) = one.query("SELECT name, start_ns, duration_ns, end_ns FROM kernel WHERE stream = 13 LIMIT 1").rows()
    assert row == {"name": "gemm", "start_ns": START_NS + 100, "duration_ns": 50, "end_ns": START_NS + 150}


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        (
            "SELECT priority, queued_ns, graph_id FROM kernel ORDER BY start_ns",
            [(-5, None, None), (None, None, None)],
        ),
        (
            f"SELECT name, op, op_id, launch_ns - {START_NS} FROM kernel ORDER BY start_ns",
            [("gemm", "aten::addmm", 2, 20), ("relu", None, None, 70)],
        ),
        ("SELECT id, parent_id, depth, self_ns FROM cpu_op ORDER BY id", [(1, None, 0, 25), (2, 1, 1, 15)]),
        (
            "SELECT kind, count(*), sum(duration_ns) FROM events GROUP BY kind ORDER BY kind",
            [("cpu_op", 2, 55), ("cuda_runtime", 2, 10), ("kernel", 2, 55), ("overhead", 1, 2)],
        ),
        (
            "SELECT DISTINCT kind, thread, stream FROM events WHERE kind IN ('cpu_op', 'kernel') ORDER BY kind",
            [("cpu_op", 1, None), ("kernel", None, 13)],
        ),
    ],
    ids=["special numbers are null", "operator and launch of GPU rows", "place of operators in the tree",
         "events are the rows of all kinds", "null where a column does not apply"],
)  # fmt: skip
def test_rows_have_what_belongs_to_them(one: Database, sql: str, rows: list[tuple[Any, ...]]) -> None:
    assert [tuple(row.values()) for row in one.query(sql).rows()] == rows


def test_several_traces_are_under_each_other_with_rank_and_name(two: Database) -> None:
    assert two.query('SELECT rank, "trace", count(*) AS n FROM kernel GROUP BY ALL ORDER BY rank').rows() == [
        {"rank": 0, "trace": "rank0.json", "n": 2},
        {"rank": 3, "trace": "rank3.json", "n": 2},
    ]


def test_a_column_in_a_filter_alone_is_read(two: Database) -> None:
    assert two.query("SELECT count(*) AS n FROM kernel WHERE duration_ns > 5 AND rank = 3").rows() == [{"n": 1}]


def test_traces_are_described(two: Database) -> None:
    rows = two.query(
        "SELECT rank, host, pid, window_end_ns - window_start_ns AS ns, activities FROM traces ORDER BY 1"
    ).rows()
    assert rows[1] == {"rank": 3, "host": "host", "pid": 4242, "ns": 1_000_000, "activities": 7}


def test_devices_are_rows() -> None:
    device = {"id": 0, "name": "H200", "totalGlobalMem": 5, "computeMajor": 9, "computeMinor": 0, "numSms": 132}
    with Database([SqlSource("a", Context(trace({}, devices=(device,))))]) as database:
        rows = database.query("SELECT device, name, compute_major, properties->>'numSms' AS sms FROM devices").rows()
    assert rows == [{"device": 0, "name": "H200", "compute_major": 9, "sms": "132"}]


def test_every_table_can_be_read_whole_even_if_it_is_empty() -> None:
    with Database([SqlSource("a", Context(trace({})))]) as database:
        for name in (*SCHEMAS, "events"):
            result = database.query(f"SELECT * FROM {name}")
            assert result.table.column_names == [column.name for column in find_table(name).columns]
            assert not len(result)


def test_every_column_says_what_it_is() -> None:
    for table in sql_tables().values():
        assert table.description, table.name
        for column in table.columns:
            assert column.meaning, f"{table.name}.{column.name}"
            assert column.type, f"{table.name}.{column.name}"


def test_meanings_name_no_special_numbers_that_are_null() -> None:
    columns = {column.name: column.meaning for column in find_table("kernel").columns}
    assert columns["graph_id"] == "CUDA graph"
    assert columns["external_id"] == "id of the innermost op or annotation around that call"


CHROME = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm\ud800", "pid": 0, "tid": 7, "ts": 1000.5, "dur": 2.25}
        | {"args": {"device": 0, "stream": 7, "correlation": 3, "grid": [4, 2, 1], "blocks per SM": 0.25}},
        {"ph": "X", "cat": "kernel", "name": "relu", "pid": 0, "tid": 7, "ts": 1010, "dur": 1, "args": {}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 1020, "dur": 1}
        | {"args": {"bytes": 4096, "memory bandwidth (GB/s)": 4.096}},
    ]
}


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    path = tmp_path_factory.mktemp("chrome") / "trace.json"
    path.write_text(json.dumps(CHROME))
    with Database([SqlSource("trace.json", Context(open_trace(path)))]) as database:
        yield database


def test_of_files_what_an_event_did_not_have_is_null(from_file: Database) -> None:
    assert from_file.query("SELECT duration_ns, grid_x, grid_y, registers FROM kernel ORDER BY start_ns").rows() == [
        {"duration_ns": 2250, "grid_x": 4, "grid_y": 2, "registers": None},
        {"duration_ns": 1000, "grid_x": None, "grid_y": None, "registers": None},
    ]


def test_of_files_the_rest_of_the_arguments_is_json(from_file: Database) -> None:
    rows = from_file.query(
        "SELECT CAST(args->>'blocks per SM' AS DOUBLE) AS blocks FROM kernel ORDER BY start_ns"
    ).rows()
    assert rows == [{"blocks": 0.25}, {"blocks": None}]


def test_of_files_known_arguments_without_a_place_in_the_model_are_columns(from_file: Database) -> None:
    assert from_file.query("SELECT bytes, bandwidth FROM gpu_memcpy").rows() == [{"bytes": 4096, "bandwidth": 4.096}]


def test_names_that_are_no_valid_text_can_be_read(from_file: Database) -> None:
    names = [row["name"] for row in from_file.query("SELECT name FROM kernel ORDER BY start_ns").rows()]
    assert (names[0].startswith("gemm"), names[1]) == (True, "relu")


@pytest.mark.parametrize("ways", [(), ("chrome",), ("perfetto",)])
def test_counters_have_texts_and_units_and_are_no_events(ways: tuple[str, ...]) -> None:
    measured = trace({**ROWS, "counter": [sample(0, 100, 12.5), sample(100, 300, NAN, device=1, unit="")]})
    with Database([SqlSource("a.json", Context(through(measured, ways)))]) as database:
        found = database.query("SELECT name, device, metric, unit, value, duration_ns FROM counter ORDER BY start_ns")
        assert [tuple(row.values()) for row in found.rows()] == [
            ("DRAM", 0, "dram__throughput.avg", "%", 12.5, 100),
            ("DRAM", 1, "dram__throughput.avg", None, None, 200),
        ]
        assert database.query("SELECT count(*) AS n FROM events WHERE kind = 'counter'").rows() == [{"n": 0}]
        (row,) = database.query("SELECT activities FROM traces").rows()
        assert ways or row == {"activities": 7}
