"""`kinetoctl query` and `export` over small stored traces."""

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kineto_trace.open.raw_target import load_target
from kineto_trace.sql import sql_tables
from kineto_trace.store.parquet_folder import save_columns
from support.service.cli import Run, run_here
from support.service.stored import store
from support.trace_files.declared import write_target

BY_NAME = "SELECT name, count(*) AS calls, sum(duration_ns) AS ns FROM kernel GROUP BY name"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_here(capsys, "unix:/nowhere.sock", *arguments)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    store(folder / "a" / "trace", rank=0)
    store(folder / "b" / "trace", rank=1, kernel_us=60)
    return folder


def test_a_query_is_a_table(run: Run, traces: Path) -> None:
    result = run("query", BY_NAME, str(traces / "a"))
    assert (result.code, result.stdout, result.stderr) == (0, "NAME  CALLS      NS\ngemm      2  60,000\n", "")


def test_json_is_a_list_of_typed_rows_in_the_order_of_the_query(run: Run, traces: Path) -> None:
    sql = (
        "SELECT rank, \"trace\", duration_ns / 1000 AS us, name = 'gemm' AS gemm FROM kernel ORDER BY us DESC, start_ns"
    )
    rows = run("query", sql, str(traces), "-o", "json").json()
    assert rows[0] == {"rank": 1, "trace": "b/trace", "us": 60.0, "gemm": True}
    assert [row["us"] for row in rows] == [60.0, 60.0, 30.0, 30.0]


def test_csv_and_files(run: Run, traces: Path, tmp_path: Path) -> None:
    text = run("query", BY_NAME, str(traces / "a"), "-o", "csv").stdout
    assert list(csv.reader(io.StringIO(text))) == [["name", "calls", "ns"], ["gemm", "2", "60000"]]
    path = tmp_path / "out.parquet"
    assert run("query", BY_NAME, str(traces / "a"), "-o", str(path)).code == 0
    assert pq.read_table(path).to_pylist() == [{"name": "gemm", "calls": 2, "ns": 60_000}]


def test_a_view_is_a_table(run: Run, traces: Path) -> None:
    rows = run("query", "SELECT rank, name, calls FROM kernels ORDER BY rank", str(traces), "-o", "json").json()
    assert rows == [{"rank": 0, "name": "gemm", "calls": 2}, {"rank": 1, "name": "gemm", "calls": 2}]


def test_wrong_sql_shows_where(run: Run, traces: Path) -> None:
    result = run("query", "SELECT name FROM kernel WHER 1", str(traces / "a"))
    assert result.code == 2
    assert result.stderr.startswith("error: Parser Error: syntax error at or near")
    assert "[QUERY_INVALID]\n\nLINE 1: SELECT name FROM kernel WHER 1\n" in result.stderr
    assert "nanobind" not in result.stderr


def test_an_unknown_table_is_answered_with_those_there_are(run: Run, traces: Path) -> None:
    result = run("query", "SELECT * FROM kernal", str(traces / "a"))
    assert "no table 'kernal'; available: events, kernel, " in result.stderr


def test_a_query_needs_a_trace_and_sql(run: Run) -> None:
    assert run("query").code == 2
    assert "name a trace" in run("query", "SELECT 1").stderr


def test_schema_lists_tables_and_describes_one(run: Run) -> None:
    lines = run("query", "--schema").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(sql_tables())
    text = run("query", "--schema", "kernel").stdout
    assert text.startswith("kernel\n\nKernels that ran on a GPU.\n")
    assert "duration_ns            BIGINT     ns     how long it took\n" in text


def test_schema_with_a_trace_also_describes_its_own_tables(run: Run, tmp_path: Path) -> None:
    save_columns(load_target(write_target(tmp_path / "target")).trace, tmp_path / "npu")
    assert run("query", "--schema", "npu_wait").code == 2
    text = run("query", "--schema", "npu_wait", str(tmp_path / "npu")).stdout
    assert text.startswith("npu_wait\n\nWaits of a queue.\n")
    assert "load         DOUBLE    -     load of the queue in percent\n" in text
    lines = run("query", str(tmp_path / "npu"), "--schema").stdout.splitlines()
    assert "npu_wait" in [line.split()[0] for line in lines]


def test_schema_for_programs_has_every_column(run: Run) -> None:
    tables = run("query", "--schema", "-o", "json").json()
    assert [table["name"] for table in tables] == list(sql_tables())
    assert all(column["meaning"] and column["type"] for table in tables for column in table["columns"])
    assert run("query", "--schema", "nothing").code == 2


def test_export_writes_by_suffix(run: Run, traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    result = run("export", str(traces / "a"), "-o", str(path))
    assert (result.code, result.stdout.startswith(f"{path} (")) == (0, True)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) == 2


def test_a_scrubbed_export_names_no_host(run: Run, tmp_path: Path) -> None:
    given, path = tmp_path / "given.json", tmp_path / "shared.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 3, "tid": 4}
    given.write_text(json.dumps({"host_name": "gpu-7", "traceEvents": [event]}))
    hosts = []
    for option in (), ("--scrub",):
        assert run("export", str(given), *option, "-o", str(path)).code == 0
        hosts.append(json.loads(path.read_text())["host_name"])
    assert hosts == ["gpu-7", "host"]


def test_export_tells_what_it_wrote(run: Run, traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    document = run("-o", "json", "export", str(traces / "a"), "-o", str(path)).json()
    assert document == {"path": str(path), "size_bytes": path.stat().st_size, "notes": []}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "t.xyz"], 2, "t.xyz has no known trace suffix"),
        (["-o", "t.json", "--format", "nothing"], 2, "no trace format is called 'nothing'; available: chrome"),
        (["-o", "/no/folder/t.json"], 5, "cannot write /no/folder/t.json: No such file or directory"),
        ([], 2, "Missing option '-o' / '--output'"),
        (["-o", "t.json", "--merge", "--scrub"], 2, "--scrub cannot be combined with --merge: scrub each trace first"),
    ],
)
def test_export_errors_say_what_to_do(run: Run, traces: Path, arguments: list[str], code: int, message: str) -> None:
    result = run("export", str(traces / "a"), *arguments)
    assert (result.code, message in result.stderr) == (code, True), result.stderr


def test_export_does_not_replace_the_trace_itself(run: Run, traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert run("export", str(traces / "a"), "-o", str(path)).code == 0
    result = run("export", str(path), "-o", str(path))
    assert (result.code, "is the input trace itself" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "rest"),
    [
        (("{trace}", "SELECT 1", "other.json"), "'SELECT 1' {trace} other.json"),
        (("{trace}",), "'SELECT …' {trace}"),
        (("20261120-083118-ab12", "SELECT 1"), "'SELECT 1' 20261120-083118-ab12"),
    ],
)
def test_a_trace_in_the_place_of_the_query_is_told(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], rest: str
) -> None:
    trace = tmp_path / "trace.json"
    trace.touch()
    result = run("query", *(each.format(trace=trace) for each in arguments))
    assert (result.code, result.stdout) == (2, "")
    first = arguments[0].format(trace=trace)
    expected = f"the query must come first, but {first} is a trace; write: kinetoctl query {rest.format(trace=trace)}\n"
    assert expected in result.stderr
