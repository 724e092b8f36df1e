"""The HLO instruction of a kernel is in every form of a trace, and comes back when that is read."""

import json
from pathlib import Path

import kineto_trace as kt
import pyarrow.parquet as pq
import pytest
from kineto_trace.model.trace import Trace
from support.trace_files import traces

HLO = '"hlo_op":"fusion.2","hlo_module":"jit_f","op_name":"jit(f)/add","source":"a.py:7"'
NAMED = ("fusion.2", "jit_f", "jit(f)/add", "a.py:7", 2)


def recorded() -> Trace:
    return traces.trace(
        {
            "kernel": [
                {"name": "fusion_2", "start": 0, "duration": 2_000, "hlo": HLO, "correlation": 1},
                {"name": "other", "start": 3_000, "duration": 2_000, "hlo": "", "correlation": 2},
                {"name": "fusion_2", "start": 6_000, "duration": 2_000, "hlo": HLO, "correlation": 3},
            ]
        }
    )


def named(trace: Trace) -> "list[tuple[object, ...]]":
    rows = kt.run_view("hlo_ops", trace).rows()
    return [tuple(row[key] for key in ("hlo_op", "hlo_module", "op_name", "source", "runs")) for row in rows]


@pytest.mark.parametrize(("name", "form"), [("a.json", ""), ("a.json.gz", ""), ("a.pftrace", ""), ("a", "store")])
def test_it_comes_back(tmp_path: Path, name: str, form: str) -> None:
    written = kt.export_trace(recorded(), tmp_path / name, format=form)
    assert named(kt.open_trace(written.path)) == [NAMED]


def test_what_was_read_from_a_file_and_written_again_has_it_too(tmp_path: Path) -> None:
    first = kt.export_trace(recorded(), tmp_path / "a.json")
    second = kt.export_trace(kt.open_trace(first.path), tmp_path / "b.json")
    assert named(kt.open_trace(second.path)) == [NAMED]


def test_sql_has_it_as_an_object() -> None:
    text = "SELECT hlo->>'hlo_module' AS module, hlo->>'source' AS place, count(*) AS runs FROM kernel GROUP BY ALL"
    rows = kt.query(text, recorded()).rows()
    assert sorted((row["module"] or "", row["place"], row["runs"]) for row in rows) == [
        ("", None, 1),
        ("jit_f", "a.py:7", 2),
    ]


def test_a_stored_trace_without_the_column_has_none(tmp_path: Path) -> None:
    folder = kt.save_trace(recorded(), tmp_path / "old.kineto")
    path = Path(folder) / "kernel.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["hlo"]), path)
    described = Path(folder) / "trace.json"
    values = json.loads(described.read_text())
    values["tables"]["kernel"]["columns"].remove("hlo")
    values["tables"]["kernel"]["bytes"] = path.stat().st_size
    described.write_text(json.dumps(values))
    assert kt.open_trace(folder).table("kernel")["hlo"].tolist() == [-1, -1, -1]
