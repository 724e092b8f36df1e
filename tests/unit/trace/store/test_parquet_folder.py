import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_trace.decode.hardware_counters import counter_table
from kineto_trace.errors import SpoolError
from kineto_trace.model.trace import LazyColumns, StringTable, Table, Trace
from kineto_trace.open.raw_target import load_target
from kineto_trace.spool.counter_samples import CounterHeader, CounterSamples, SampledMetric
from kineto_trace.store.parquet_folder import is_stored, load_columns, save_columns
from support.counters.trace_samples import NAN, as_chrome, readable, sample, through
from support.trace_files.h200 import RECORDINGS, make_spool
from support.trace_files.traces import target, trace


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
    with pytest.raises(
        SpoolError,
        match="is a stored trace in format 1, but this version reads only 2 and 3: use the kinetod that stored",
    ):
        load_columns(tmp_path)


def test_one_file_per_kind_and_no_temporary_ones(tmp_path: Path) -> None:
    save_columns(trace({"kernel": [{"name": "k"}], "overhead": []}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kernel.parquet",
        "overhead.parquet",
        "strings.parquet",
        "trace.json",
    ]


@pytest.mark.parametrize("damage", ["gone", "version", "cut", "table", "strings"])
def test_damaged_columns_are_a_spool_error(tmp_path: Path, damage: str) -> None:
    save_columns(trace({"kernel": [{"name": "k"}]}), tmp_path)
    description = tmp_path / "trace.json"
    if damage == "gone":
        description.unlink()
    elif damage == "version":
        description.write_text(json.dumps({**json.loads(description.read_text()), "format_version": 99}))
    elif damage == "cut":
        (tmp_path / "kernel.parquet").write_bytes(b"PAR1")
    elif damage == "strings":
        (tmp_path / "strings.parquet").unlink()
    else:
        (tmp_path / "kernel.parquet").unlink()
    with pytest.raises(SpoolError):
        load_columns(tmp_path)


def with_origin(written: Trace, kind: str, **origin: Any) -> Trace:
    table = written.tables[kind]
    columns = {name: np.array(values) for name, values in origin.items()}
    return Trace(
        target=written.target,
        strings=written.strings,
        tables={**written.tables, kind: Table(kind, table.columns, columns)},
        window_start_ns=written.window_start_ns,
        window_end_ns=written.window_end_ns,
        head={"schemaVersion": "1", "distributedInfo": '{"rank": 3}'},
        notes=("2 events are not valid JSON and left out",),
    )


def test_what_rows_of_a_file_were_like_reads_back_as_it_was(tmp_path: Path) -> None:
    rows = [{"name": "k"}, {"name": '"queued":0'}, {"name": "k"}]
    written = with_origin(
        trace({"kernel": rows}),
        "kernel",
        pid=np.array([0, -(2**62) - 1, 7], np.int64),
        tid=np.array([7, 7, 2**40], np.int64),
        category=np.array([0, -1, 0], np.int32),
        present=np.array([2**63, 0, 5], np.uint64),
        args=np.array([1, 1, -1], np.int32),
        members=np.array([-1, -1, -1], np.int32),
    )
    save_columns(written, tmp_path)
    read = load_columns(tmp_path)
    assert (read.head, read.notes) == (written.head, written.notes)
    for name, values in written.tables["kernel"].origin.items():
        found = read.tables["kernel"].origin[name]
        assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())


def test_a_capture_has_no_origin_when_it_is_read_back(tmp_path: Path) -> None:
    save_columns(trace({"kernel": [{"name": "k"}]}), tmp_path)
    assert not load_columns(tmp_path).tables["kernel"].origin


def test_the_file_of_a_table_has_texts_that_any_reader_understands(tmp_path: Path) -> None:
    save_columns(trace({"kernel": [{"name": "gemm", "duration": 5}, {"name": "copy", "duration": 3}]}), tmp_path)
    stored = pq.read_table(tmp_path / "kernel.parquet")
    assert stored["name"].to_pylist() == ["gemm", "copy"]
    assert pa.types.is_dictionary(stored["name"].type)
    metadata = pq.ParquetFile(tmp_path / "kernel.parquet").metadata.row_group(0)
    names = [metadata.column(place).path_in_schema for place in range(metadata.num_columns)]
    name = metadata.column(names.index("name"))
    assert (name.compression, "RLE_DICTIONARY" in name.encodings) == ("ZSTD", True)


def test_only_the_columns_that_are_looked_at_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_columns(trace({"kernel": [{"name": "k", "duration": 5}], "overhead": [{"name": "o"}]}), tmp_path)
    asked: list[tuple[str, list[str]]] = []
    read = pq.ParquetFile.read

    def noted(self: pq.ParquetFile, columns: list[str], **options: Any) -> pa.Table:
        asked.append((str(self.metadata.num_columns), columns))
        return read(self, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", noted)
    opened = load_columns(tmp_path)
    kernels = opened.table("kernel")
    assert (len(kernels), asked) == (1, [])
    later = kernels.take(np.array([True]))
    assert (len(later), later["duration"].tolist(), kernels["duration"].tolist()) == (1, [5], [5])
    assert [columns for _, columns in asked] == [["duration"]]


def test_damage_that_only_reading_finds_is_a_spool_error(tmp_path: Path) -> None:
    save_columns(trace({"kernel": [{"name": "k", "start": 3}] * 1000}), tmp_path)
    file = tmp_path / "kernel.parquet"
    file.write_bytes(bytes(len(file.read_bytes())))
    opened = load_columns(tmp_path)
    with pytest.raises(SpoolError, match=r"cannot read .*kernel.parquet"):
        opened.table("kernel")["start"]


def test_a_trace_of_format_2_opens_and_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    save_columns(trace({}), tmp_path)
    description = json.loads((tmp_path / "trace.json").read_text())
    old = {name: value for name, value in description.items() if name not in ("head", "notes")}
    old |= {"format_version": 2, "strings": ["", "main"], "tables": ["python_function"]}
    (tmp_path / "trace.json").write_text(json.dumps(old))
    (tmp_path / "strings.parquet").unlink()
    columns = {name: np.array([4], kind) for name, kind in (("start", "int64"), ("duration", "int64"))}
    columns |= {"name": np.array([1], np.int32), "thread": np.array([9], np.uint32)}
    columns |= {name: np.array([0], np.int32) for name in ("depth", "parent", "samples", "self_samples")}
    pq.write_table(pa.table(columns), tmp_path / "python_function.parquet")
    read = load_columns(tmp_path)
    table = read.table("python_function")
    assert (len(table), read.strings[table["name"][0]], table["module"].tolist()) == (1, "main", [-1])
    assert (read.head, read.notes) == (None, ())


def test_a_chrome_trace_called_trace_json_is_no_stored_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    assert not is_stored(tmp_path)
    assert not is_stored(tmp_path / "none")
    save_columns(trace({}), tmp_path)
    assert is_stored(tmp_path)


@settings(max_examples=40)
@given(names=st.lists(st.text(st.characters(exclude_categories=()), max_size=8), max_size=12))
def test_any_text_reads_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = tmp_path_factory.mktemp("any")
    written = trace({"kernel": [{"name": name} for name in names]})
    save_columns(written, folder)
    read = load_columns(folder)
    assert read.strings == written.strings
    assert (read.table("kernel")["name"] == written.table("kernel")["name"]).all()


def test_lazy_columns_know_what_they_have() -> None:
    columns = LazyColumns(["a", "b"], 2, lambda name: np.array([name, name]))
    assert (list(columns), len(columns), "a" in columns, "c" in columns) == (["a", "b"], 2, True, False)
    assert columns["b"].tolist() == ["b", "b"]
    with pytest.raises(KeyError):
        columns["c"]


@pytest.mark.parametrize("from_file", [False, True])
def test_samples_of_counters_read_back_with_their_texts(tmp_path: Path, from_file: bool) -> None:
    written = trace({"counter": [sample(0, 10, 12.5), sample(10, 20, NAN), sample(5, 9, 1, device=3, unit="")]})
    if from_file:
        written = through(written, ["chrome"])
    save_columns(written, tmp_path)
    read = load_columns(tmp_path)
    assert readable(read) == readable(written)
    assert pq.read_table(tmp_path / "counter.parquet")["metric"].to_pylist() == ["dram__throughput.avg"] * 3
    if from_file:
        assert as_chrome(read) == as_chrome(written)


def test_a_minute_of_eight_counters_at_1_ms_takes_less_than_2_mb(tmp_path: Path) -> None:
    count, random = 60_000, np.random.default_rng(7)
    edges = 1_795_163_478_000_000_000 + np.arange(count + 1) * 10**6 + random.integers(-10, 11, count + 1) * 32
    busy = np.where(np.arange(count) // 7 % 3, 0, 93.0)
    values = np.empty((count, 8), np.float32)
    for number in range(8):
        values[:, number] = np.where(busy, busy * (1 - number / 10) + random.normal(0, 1.5, count), 0)
    metrics = tuple(SampledMetric(name=f"unit__metric_{n}.avg", label=f"label {n}", unit="%") for n in range(8))
    header = CounterHeader(
        gpu_uuid="", gpu_index=0, chip="", interval_ns=10**6, metrics=metrics, set="", backend="", library_version=""
    )
    samples = CounterSamples(header=header, start_ns=edges[:-1], end_ns=edges[1:], values=values, disordered=0)
    strings = StringTable()
    table = counter_table([(0, samples)], strings, 0, 2**62)
    save_columns(trace({}, tables={"counter": table}, strings=tuple(strings.strings)), tmp_path)
    assert (tmp_path / "counter.parquet").stat().st_size < 2_000_000
