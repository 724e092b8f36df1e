import subprocess
import sys
from pathlib import Path

import kineto_trace
import pytest
from kineto_trace.errors import FormatError
from support.trace_files.traces import trace


def test_importing_the_package_imports_nothing_big() -> None:
    big = ("numpy", "pyarrow", "duckdb", "distributed")
    code = f"import sys, kineto_trace; print([name for name in {big} if name in sys.modules])"
    path = repr([entry for entry in sys.path if entry])
    output = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {code}"], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in kineto_trace.__all__:
        assert getattr(kineto_trace, name).__doc__
        assert name in dir(kineto_trace)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kineto_trace.nothing


def test_a_trace_is_saved_opened_analysed_and_exported(tmp_path: Path) -> None:
    made = trace({"kernel": [{"name": "gemm", "duration": 2_000}]})
    opened = kineto_trace.open_trace(kineto_trace.save_trace(made, tmp_path / "a.kineto"))
    assert opened.table("kernel")["duration"].tolist() == [2_000]
    written = kineto_trace.export_trace(opened, tmp_path / "trace.json")
    assert written.size_bytes == (tmp_path / "trace.json").stat().st_size
    assert kineto_trace.export_trace(opened, tmp_path / "copy", format="store").path == tmp_path / "copy"
    with pytest.raises(FormatError):
        kineto_trace.export_trace(opened, tmp_path / "trace.doc")


def test_all_views_are_documented_and_in_the_order_of_names() -> None:
    found = kineto_trace.views()
    assert list(found) == sorted(found)
    for view in found.values():
        assert len(view.description) > 20, view.name
        assert all(column.meaning for column in view.columns), view.name
