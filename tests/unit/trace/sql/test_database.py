"""Queries over traces that are named, found or open."""

from pathlib import Path

import kineto_trace as kt
import pytest
from kineto_trace.errors import FileError, QueryError
from kineto_trace.model.context import Context
from kineto_trace.open.trace_source import Source
from kineto_trace.sql.database import source_names
from kineto_trace.store.parquet_folder import save_columns
from support.trace_files.traces import target, trace

SQL = "SELECT rank, trace, count(*) AS kernels FROM kernel GROUP BY ALL ORDER BY rank"


def test_an_open_trace_or_its_context_is_asked_in_sql() -> None:
    made = trace({"kernel": [{"name": "gemm"}] * 3}, target=target(rank=2), notes=["cut off"])
    result = kt.query(SQL, made)
    assert result.rows() == [{"rank": 2, "trace": "trace", "kernels": 3}]
    assert result.notes == ("cut off",)
    assert kt.query(SQL, Context(made, rank=5)).rows() == [{"rank": 5, "trace": "trace", "kernels": 3}]


def test_all_ranks_of_a_folder_are_one_table(tmp_path: Path) -> None:
    for rank in range(2):
        made = trace({"kernel": [{"name": "gemm"}] * (rank + 1)}, target=target(rank=rank, pid=10 + rank))
        save_columns(made, tmp_path / f"rank{rank}.kineto")
    expected = [{"rank": rank, "trace": f"rank{rank}.kineto", "kernels": rank + 1} for rank in range(2)]
    assert kt.query(SQL, tmp_path).rows() == expected
    assert kt.query(SQL, kt.find_traces(tmp_path)).rows() == expected


def test_what_is_no_query_or_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="available: "):
        kt.query("SELECT * FROM nothing", trace({}))
    with pytest.raises(FileError):
        kt.query(SQL, tmp_path / "nothing")


def test_traces_of_one_name_are_told_apart_by_their_folders() -> None:
    sources = [Source(path=Path(name), rank=0) for name in ("job/a/x.json", "job/b/x.json")]
    assert source_names(sources) == ["a/x.json", "b/x.json"]
    assert source_names([]) == []
