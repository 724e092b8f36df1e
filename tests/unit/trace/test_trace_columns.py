import json
from pathlib import Path

import pytest
from kineto_trace.columns import load_columns, save_columns
from kineto_trace.errors import SpoolError
from kineto_trace.load.target import load_target
from support.h200 import RECORDINGS, make_spool
from support.traces import target, trace


@pytest.mark.parametrize("name", RECORDINGS)
def test_reading_back_gives_the_same_trace(tmp_path: Path, name: str) -> None:
    written = load_target(make_spool(tmp_path, name)).trace
    save_columns(written, tmp_path / "columns")
    read = load_columns(tmp_path / "columns")
    for field in ("target", "strings", "window_start_ns", "window_end_ns", "versions", "losses", "sample_period_ns"):
        assert getattr(read, field) == getattr(written, field)
    assert [dict(device) for device in read.devices] == [dict(device) for device in written.devices]
    assert list(read.tables) == list(written.tables)
    for kind, table in written.tables.items():
        for column, values in table.columns.items():
            assert read.tables[kind][column].dtype == values.dtype
            assert (read.tables[kind][column] == values).all()


def test_operators_read_back_as_they_were(tmp_path: Path) -> None:
    written = trace(
        {
            "cpu_op": [{"name": "aten::mm", "id": 2**40, "sequence": -1, "inputs": -1, "thread": 2**32 - 1}],
            "op_tensor": [{"op": 2**40, "impl": 2**63, "storage": 2**64 - 1}],
            "gpu_user_annotation": [{"name": "step", "external_id": 3}],
        },
        target=target(options={"record_shapes": True}, iterations=[[3, 5]]),
    )
    save_columns(written, tmp_path)
    read = load_columns(tmp_path)
    assert read.target == written.target
    for kind, table in written.tables.items():
        assert {name: column.tolist() for name, column in read.tables[kind].columns.items()} == {
            name: column.tolist() for name, column in table.columns.items()
        }


def test_columns_of_another_format_say_what_to_do(tmp_path: Path) -> None:
    save_columns(trace({}), tmp_path)
    description = tmp_path / "trace.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), "format_version": 1}))
    with pytest.raises(SpoolError, match="columns of format 1, this version reads 2: use the kinetod that stored them"):
        load_columns(tmp_path)


def test_one_file_per_kind_and_no_temporary_ones(tmp_path: Path) -> None:
    save_columns(trace({"kernel": [{"name": "k"}], "overhead": []}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel.parquet", "overhead.parquet", "trace.json"]


@pytest.mark.parametrize("damage", ["gone", "version", "cut", "table"])
def test_damaged_columns_are_a_spool_error(tmp_path: Path, damage: str) -> None:
    save_columns(trace({"kernel": [{"name": "k"}]}), tmp_path)
    description = tmp_path / "trace.json"
    if damage == "gone":
        description.unlink()
    elif damage == "version":
        description.write_text(json.dumps({**json.loads(description.read_text()), "format_version": 99}))
    elif damage == "cut":
        (tmp_path / "kernel.parquet").write_bytes(b"PAR1")
    else:
        (tmp_path / "kernel.parquet").unlink()
    with pytest.raises(SpoolError):
        load_columns(tmp_path)
