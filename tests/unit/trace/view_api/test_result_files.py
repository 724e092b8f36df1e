import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kineto_trace.errors import FormatError
from kineto_trace.view_api.result import Result, columns, make_result
from kineto_trace.view_api.result_files import csv_bytes, json_value, write_result

SCHEMA = columns(
    ("name", "text", "", "of the kernel"),
    ("calls", "int", "", "how often"),
    ("total_us", "float", "us", "time of all calls"),
    ("share_pct", "float", "%", "of all kernels"),
    ("moved", "int", "bytes", "by all calls"),
    ("tensor_cores", "bool", "", "whether it uses them"),
    ("grid", "ints", "", "blocks"),
)


def result() -> Result:
    values = {
        "name": ['gemm<"a", b>', "naïve\nkernel"],
        "calls": [2, 2**53 + 1],
        "total_us": [0.1, float("nan")],
        "share_pct": [float("inf"), 50.0],
        "moved": [None, 4096],
        "tensor_cores": [True, None],
        "grid": [[1, 2, 3], None],
    }
    return make_result("kernels", SCHEMA, values, ["one kernel has no launch"])


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("=1+2", "'=1+2"),
        ("+cmd", "'+cmd"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        (" =1", "' =1"),
        ("\t=1", "'\t=1"),
        ("\r=1", r"'\x0d=1"),
        ("\uff1d1", "'\uff1d1"),
        ("-5", "-5"),
        ("+1.5e-3", "+1.5e-3"),
        ("-.5", "-.5"),
        ("-", "'-"),
        ("-inf", "'-inf"),
        ("gemm\x1b[2J", r"gemm\x1b[2J"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_text_is_no_formula_in_csv_and_numbers_stay(text: str, field: str) -> None:
    schema = columns(("name", "text", "", ""), ("n", "float", "", ""))
    made = make_result("kernels", schema, {"name": [text], "n": [-1.5]}, [])
    assert list(csv.reader(io.StringIO(csv_bytes(made).decode(), newline="")))[1] == [field, "-1.5"]


def test_csv_has_units_in_its_header_where_names_do_not_have_them() -> None:
    assert csv_bytes(result()).decode() == (
        "name,calls,total_us,share_pct,moved [bytes],tensor_cores,grid\n"
        '"gemm<""a"", b>",2,0.1,inf,,true,"[1, 2, 3]"\n'
        '"naïve\nkernel",9007199254740993,,50.0,4096,,\n'
    )


def test_json_has_types_units_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert write_result(result(), path) == path.stat().st_size
    value = json.loads(path.read_text())
    assert value == json_value(result())
    assert value["view"] == "kernels"
    assert value["notes"] == ["one kernel has no launch"]
    assert value["columns"][4] == {"name": "moved", "type": "int", "unit": "bytes", "meaning": "by all calls"}
    assert value["rows"][0] == {
        "name": 'gemm<"a", b>',
        "calls": 2,
        "total_us": 0.1,
        "share_pct": None,  # JSON has no infinity
        "moved": None,
        "tensor_cores": True,
        "grid": [1, 2, 3],
    }


def test_parquet_keeps_types_with_units_and_notes_as_metadata(tmp_path: Path) -> None:
    path = tmp_path / "kernels.parquet"
    write_result(result(), path)
    table = pq.read_table(path)
    assert table.to_pylist() == result().rows()
    assert table.schema.field("total_us").metadata == {b"unit": b"us", b"meaning": b"time of all calls"}
    assert table.schema.metadata[b"view"] == b"kernels"
    assert json.loads(table.schema.metadata[b"notes"]) == ["one kernel has no launch"]


def test_an_answer_without_rows_is_a_header(tmp_path: Path) -> None:
    empty = make_result("kernels", SCHEMA, {column.name: [] for column in SCHEMA})
    assert csv_bytes(empty).decode().count("\n") == 1
    write_result(empty, tmp_path / "kernels.json")
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"] == []


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="unknown result format 'xlsx'; available: csv, json, parquet"):
        write_result(result(), tmp_path / "kernels.xlsx")
