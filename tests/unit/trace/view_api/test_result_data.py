"""Results as Arrow tables and data frames: types, units, and values that are missing."""

import json
import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pytest
from kineto_trace.errors import TraceError
from kineto_trace.view_api.result import Result, columns, make_result
from kineto_trace.view_api.result_data import needed

BIG = 2**53 + 1  # no float64 holds it
MOMENT_NS = 1_795_163_478_000_000_123


@pytest.fixture
def result() -> Result:
    schema = columns(
        ("name", "text", "", "a name"),
        ("start_ns", "int", "ns", "when it began"),
        ("calls", "int", "", "how many"),
        ("time_us", "float", "us", "a time"),
        ("whole", "bool", "", "whether"),
        ("ranks", "ints", "", "which"),
    )
    values = {
        "name": ["gemm", None],
        "start_ns": [MOMENT_NS, None],
        "calls": [BIG, None],
        "time_us": [1.5, None],
        "whole": [True, None],
        "ranks": [[1, 2], None],
    }
    return make_result("kernels", schema, values, ["a note"])


def test_arrow_has_units_and_notes_and_unix_times_as_timestamps(result: Result) -> None:
    table = result.to_arrow()
    assert [str(field.type) for field in table.schema] == [
        "string", "timestamp[ns, tz=UTC]", "int64", "double", "bool", "list<item: int64>"
    ]  # fmt: skip
    assert table.schema.field("start_ns").metadata == {b"unit": b"ns", b"meaning": b"when it began"}
    assert table.schema.field("time_us").metadata[b"unit"] == b"us"
    assert table.schema.metadata == {b"view": b"kernels", b"notes": b'["a note"]'}
    assert table["start_ns"].cast(pa.int64()).to_pylist() == [MOMENT_NS, None]
    assert [column.null_count for column in table.columns] == [1] * 6


def test_notes_with_half_of_a_surrogate_pair_are_kept() -> None:
    schema = columns(("name", "text", "", "of it"))
    table = make_result("kernels", schema, {"name": ["a"]}, ["left out: \ud800"]).to_arrow()
    assert json.loads(table.schema.metadata[b"notes"]) == ["left out: \ud800"]


def test_pandas_keeps_integers_and_what_is_missing(result: Result) -> None:
    frame = result.to_pandas()
    assert [str(dtype) for dtype in frame.dtypes] == [
        "string", "datetime64[ns, UTC]", "Int64", "Float64", "boolean", "object"
    ]  # fmt: skip
    assert frame["calls"][0] == BIG
    assert frame["start_ns"][0] == pd.Timestamp(MOMENT_NS, unit="ns", tz="UTC")
    assert frame.loc[1].isna().all()
    assert frame.attrs["units"] == {
        "name": "",
        "start_ns": "ns",
        "calls": "",
        "time_us": "us",
        "whole": "",
        "ranks": "",
    }
    assert (frame.attrs["view"], frame.attrs["notes"]) == ("kernels", ["a note"])


def test_polars_keeps_integers_and_what_is_missing(result: Result) -> None:
    pl = pytest.importorskip("polars", reason="an extra of its own, and 40 MB that nothing else here needs")
    frame = result.to_polars()
    assert frame.schema == {
        "name": pl.String,
        "start_ns": pl.Datetime("ns", "UTC"),
        "calls": pl.Int64,
        "time_us": pl.Float64,
        "whole": pl.Boolean,
        "ranks": pl.List(pl.Int64),
    }
    assert frame.row(1) == (None,) * 6
    assert frame["calls"][0] == BIG


def test_a_result_without_rows_has_the_same_types(result: Result) -> None:
    empty = Result(result.view, result.columns, result.table.slice(0, 0))
    assert empty.to_arrow().schema.types == result.to_arrow().schema.types
    assert empty.to_pandas().dtypes.equals(result.to_pandas().dtypes)


def test_the_error_of_a_package_that_is_not_there_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, result: Result
) -> None:
    for module in ("pandas", "polars", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TraceError, match=r"^pandas is not installed: run \S+ -m pip install pandas$"):
        result.to_pandas()
    with pytest.raises(TraceError, match=r"^polars is not installed: run \S+ -m pip install polars$"):
        result.to_polars()
    with pytest.raises(TraceError, match=r"^matplotlib is not installed: run \S+ -m pip install matplotlib$"):
        needed("matplotlib.pyplot")


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import kineto_trace.catalog.view_catalog, kineto_trace.view_api.result, sys; "
        "print([name for name in ('pandas', 'polars', 'matplotlib') if name in sys.modules])"
    )
    path = repr([entry for entry in sys.path if entry])
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
