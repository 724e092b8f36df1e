"""A stored trace that somebody else has made: whatever its files say, it is read, or it is a SpoolError."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kineto_trace.base import quantities
from kineto_trace.errors import SpoolError
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.trace_files.traces import trace

KERNELS = [{"name": "gemm", "start": 3, "duration": 5}, {"name": "copy", "start": 9, "duration": 1}]
Document = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "columns"
    save_columns(trace({"kernel": KERNELS, "overhead": [{"name": "o"}]}), made)
    return made


def describe(folder: Path, change: Callable[[Document], object]) -> None:
    document = json.loads((folder / "trace.json").read_text())
    change(document)
    (folder / "trace.json").write_text(json.dumps(document))


def read_all(folder: Path) -> None:
    read = load_columns(folder)
    for table in read.tables.values():
        for columns in (table.columns, table.origin):
            for name in columns:
                assert len(columns[name]) == len(table)
    assert all(isinstance(text, str) for text in read.strings)
    [read.strings[number] for number in read.table("kernel")["name"]]


@pytest.mark.parametrize(
    "kind", ["../outside", "/etc/outside", "kernel/../../outside", "no_such_kind", "", "kernel\x1b[2J"]
)
def test_the_name_of_a_table_leads_nowhere_else(folder: Path, kind: str) -> None:
    for place in (folder.parent, folder):
        (place / "outside.parquet").write_bytes((folder / "kernel.parquet").read_bytes())
    describe(folder, lambda document: document["tables"].update({kind: document["tables"]["kernel"]}))
    with pytest.raises(SpoolError, match="unknown kind of activity") as caught:
        load_columns(folder)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("fetched", [True, False])
def test_nothing_else_is_fetched(folder: Path, fetched: bool) -> None:
    asked: list[str] = []
    describe(folder, lambda document: document["tables"].update({"../x": document["tables"]["kernel"]}))
    with pytest.raises(SpoolError):
        load_columns(folder, asked.append if fetched else None)
    assert asked == []


@pytest.mark.parametrize("rows", [1 << 40, 1, -1, True, 2.0, None])
def test_a_table_has_the_rows_of_its_file_and_no_others_are_made_room_for(folder: Path, rows: Any) -> None:
    describe(folder, lambda document: document["tables"]["kernel"].update(rows=rows, columns=[]))
    with pytest.raises(SpoolError):
        read_all(folder)


@pytest.mark.parametrize("text", ["O", "V8", "M8[ns]", "U1000000000", "i4,i4", "(1000,1000)f8", "f16", "object"])
def test_a_column_has_a_type_of_numbers(folder: Path, text: str) -> None:
    describe(folder, lambda document: document["tables"]["kernel"]["origin"].update(place=text))
    with pytest.raises(SpoolError, match="is not a numeric type"):
        read_all(folder)


def replace_column(folder: Path, name: str, values: pa.Array) -> None:
    path = folder / "kernel.parquet"
    table = pq.read_table(path).slice(0, len(values))
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)
    describe(folder, lambda document: document["tables"]["kernel"].update(bytes=path.stat().st_size))


@pytest.mark.parametrize(
    "values",
    [pa.array([None, 3]), pa.array([[1], [2]]), pa.array([1.5, float("nan")]), pa.array(["x", "y"]),
     pa.array([b"x", b"y"]), pa.array([{"a": 1}, {"a": 2}]), pa.array([1, 2], pa.timestamp("ns")), pa.array([1])],
)  # fmt: skip
def test_a_column_of_something_else_is_a_spool_error(folder: Path, values: pa.Array) -> None:
    replace_column(folder, "start", values)
    with pytest.raises(SpoolError):
        read_all(folder)


@pytest.mark.parametrize("number", [99, -2, 1 << 30])
def test_a_number_of_a_string_that_is_not_there_is_a_spool_error(folder: Path, number: int) -> None:
    replace_column(folder, "name", pa.array(np.array([0, number], np.int32)))
    with pytest.raises(SpoolError, match="refers to strings that do not exist"):
        read_all(folder)


@pytest.mark.parametrize(
    "texts", [pa.array([1, 2, 3]), pa.array([b"\xff", b"a", b"b"]), pa.array(["a", None, "b"]), pa.array([["a"]] * 3)]
)
def test_strings_that_are_none_are_a_spool_error(folder: Path, texts: pa.Array) -> None:
    path = folder / "strings.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    describe(folder, lambda document: document["strings"].update(bytes=path.stat().st_size, count=len(texts)))
    with pytest.raises(SpoolError):
        read_all(folder)


@pytest.mark.parametrize(("column", "type_"), [("start", pa.int64()), ("name", pa.int32())])
def test_a_table_that_takes_more_memory_than_is_free_is_not_read(
    folder: Path, column: str, type_: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = folder / "kernel.parquet", 1 << 22
    pq.write_table(pa.table({column: pa.array(np.zeros(rows), type_)}), path)
    assert path.stat().st_size < 20_000
    size = path.stat().st_size
    describe(folder, lambda document: document["tables"]["kernel"].update(rows=rows, columns=[column], bytes=size))
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_args, **_more: pytest.fail("it was read"))
    monkeypatch.setattr(quantities, "free_memory", lambda: quantities.KEPT_FREE_BYTES + rows)
    with pytest.raises(MemoryError, match=r"kernel.parquet needs another \d+ MiB of memory, but only 260 MiB are free"):
        load_columns(folder).table("kernel")[column]


def test_more_strings_than_there_should_be_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "strings.parquet"
    pq.write_table(pa.table({"text": pa.array(["x" * 1000] * 10_000)}), path)
    describe(folder, lambda document: document["strings"].update(bytes=path.stat().st_size))
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_args, **_more: pytest.fail("they were read"))
    with pytest.raises(SpoolError, match="10000 strings, not 3"):
        list(load_columns(folder).strings)


def test_too_little_memory_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_arguments: object, **_more: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 838860800 failed")

    monkeypatch.setattr(pq.ParquetFile, "read", read)
    trace = load_columns(folder)
    with pytest.raises(MemoryError):
        trace.table("kernel")["start"]
    with pytest.raises(MemoryError):
        list(trace.strings)


def test_a_description_nested_without_end_is_a_spool_error(folder: Path) -> None:
    (folder / "trace.json").write_text('{"format_version":' + "[" * 200_000)
    with pytest.raises(SpoolError):
        load_columns(folder)


VALUES: list[Any] = [
    None,
    True,
    -1,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "../x",
    "\x1b[2J",
    "\ud800",
    [],
    [1],
    {},
    {"x": 1},
    [[]],
    [None],
]


def test_whatever_else_the_description_says_it_is_read_or_a_spool_error(folder: Path) -> None:
    text = (folder / "trace.json").read_text()
    chance, refused = random.Random(15), 0
    for _ in range(500):
        document = json.loads(text)
        spoil(document, chance)
        (folder / "trace.json").write_text(json.dumps(document))
        try:
            read_all(folder)
        except SpoolError:
            refused += 1
    assert 0 < refused < 500


def spoil(document: Any, chance: random.Random) -> None:
    """Puts something else in one place of a document, somewhere."""
    while True:
        keys = list(document) if isinstance(document, dict) else range(len(document))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(document[key], (dict, list)) and document[key] and chance.random() < 0.8:
            document = document[key]
            continue
        if isinstance(document, dict) and chance.random() < 0.2:
            document[chance.choice(["../x", "", "kernel", "\x1b"])] = document.pop(key)
        else:
            document[key] = chance.choice(VALUES)
        return
