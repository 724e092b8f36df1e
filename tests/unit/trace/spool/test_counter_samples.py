"""Files of counter samples: what is written is read, and what nobody has written is refused or bounded."""

import ast
import os
from pathlib import Path

import kineto_trace
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.errors import FileError
from kineto_trace.spool.counter_samples import (
    MAGIC,
    CounterHeader,
    SampledMetric,
    cut_off,
    last_end_ns,
    read_counter_samples,
    row_type,
    write_header,
    write_rows,
)

HEADER = CounterHeader(
    gpu_uuid="GPU-1",
    gpu_index=1,
    chip="GH100",
    interval_ns=1_000_000,
    metrics=tuple(SampledMetric(name=name, label=name.upper(), unit="%") for name in ("a", "b", "c")),
    set="overview",
    backend="cupti",
    library_version="130001",
)


def rows(times: list[tuple[int, int]]) -> npt.NDArray[np.void]:
    made = np.zeros(len(times), dtype=row_type(3))
    for row, (start, end) in zip(made, times, strict=True):
        row["start_ns"], row["end_ns"], row["values"] = start, end, (start, float("nan"), end)
    return made


def written(path: Path, times: list[tuple[int, int]]) -> Path:
    with path.open("wb") as file:
        write_header(file, HEADER)
        write_rows(file, rows(times))
    return path


def test_a_file_reads_as_it_was_written(tmp_path: Path) -> None:
    found = read_counter_samples(written(tmp_path / "file", [(10, 20), (20, 30), (45, 50)]))
    assert found.header == HEADER
    assert (found.start_ns.tolist(), found.end_ns.tolist(), found.disordered) == ([10, 20, 45], [20, 30, 50], 0)
    assert found.values[:, 0].tolist() == [10, 20, 45] and np.isnan(found.values[:, 1]).all()
    assert found.values.dtype == np.float32


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    data = written(tmp_path / "file", [(1, 2)]).read_bytes()
    length = int.from_bytes(data[8:12], "little")
    assert data[:8] == b"KCSAMP01" and data[12 : 12 + length].startswith(b'{"gpu_uuid":"GPU-1","gpu_index":1,')
    begin = 12 + length + -(12 + length) % 8
    assert data[12 + length : begin] == bytes(begin - 12 - length)
    assert len(data) - begin == 32  # 8 + 8 + 3 * 4, and padding
    assert data[begin : begin + 16] == (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    assert data[-4:] == bytes(4)


def test_a_row_that_a_crash_cut_off_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "file", [(10, 20), (20, 30)])
    os.truncate(path, path.stat().st_size - 1)
    assert read_counter_samples(path).start_ns.tolist() == [10]


def test_rows_with_impossible_times_are_left_out_and_counted(tmp_path: Path) -> None:
    found = read_counter_samples(
        written(tmp_path / "file", [(10, 20), (15, 25), (30, 30), (-5, 40), (40, 50), (20, 30)])
    )
    assert (found.start_ns.tolist(), found.disordered) == ([10, 40], 4)


def test_a_file_without_rows_has_none(tmp_path: Path) -> None:
    found = read_counter_samples(written(tmp_path / "file", []))
    assert (len(found.start_ns), found.values.shape) == (0, (0, 3))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "does not begin with KCSAMP01"),
        (b"KCSAMP02" + bytes(8), "does not begin with KCSAMP01"),
        (MAGIC + b"\xff\xff\xff\xff", "its header of 4294967295 bytes"),
        (MAGIC + b"\x04\x00\x00\x00nope", "its header cannot be decoded"),
        (MAGIC + b"\x02\x00\x00\x00{}", "its header cannot be decoded"),
        (MAGIC + b"\x00\x80\x00\x00" + b"[" * 0x8000, "its header cannot be decoded"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(FileError, match=problem):
        read_counter_samples(tmp_path / "file")


def test_files_that_are_none_or_too_large_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="is not a regular file"):
        read_counter_samples(tmp_path / "pipe")
    with pytest.raises(FileError, match="cannot be read"):
        read_counter_samples(tmp_path / "none")
    path = written(tmp_path / "file", [(1, 2)])
    with pytest.raises(FileError, match="exceed the limit of 100"):
        read_counter_samples(path, max_bytes=100)


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    bad = CounterHeader(
        gpu_uuid="x" * 300, gpu_index=0, chip="", interval_ns=1, metrics=HEADER.metrics, set="", backend="",
        library_version="",
    )  # fmt: skip
    with (tmp_path / "file").open("wb") as file, pytest.raises(ValueError, match="gpu_uuid"):
        write_header(file, bad)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damage_is_told_or_leaves_ordered_rows(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    path = written(tmp_path_factory.mktemp("noise") / "file", [(n * 10, n * 10 + 10) for n in range(4)])
    data = bytearray(path.read_bytes())
    data[at : at + len(noise)] = noise
    path.write_bytes(data)
    try:
        found = read_counter_samples(path)
    except FileError:
        return
    assert (found.end_ns > found.start_ns).all() and (found.start_ns[1:] >= found.end_ns[:-1]).all()


def test_the_end_of_the_last_whole_row_is_read_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "file", [(10, 20), (20, 30)])
    assert last_end_ns(path) == 30
    os.truncate(path, path.stat().st_size - 1)  # somebody is writing the second row
    assert last_end_ns(path) == 20
    assert last_end_ns(written(path, [])) == 0


def test_a_file_that_is_cut_off_has_what_ended_until_then_and_its_header(tmp_path: Path) -> None:
    path = written(tmp_path / "file", [(10, 20), (20, 30), (30, 40)])
    before = read_counter_samples(path)
    cut_off(path, 30)
    found = read_counter_samples(path)
    assert (found.header, found.end_ns.tolist()) == (before.header, [20, 30])
    assert np.array_equal(found.values, before.values[:2], equal_nan=True)
    cut_off(path, 19)
    assert len(read_counter_samples(path).end_ns) == 0
    with pytest.raises(FileError, match="cannot be truncated"):
        cut_off(tmp_path / "none", 30)


def test_a_file_without_a_header_has_no_last_row(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    with pytest.raises(FileError, match="is not a file of counter samples"):
        last_end_ns(path)
    with pytest.raises(FileError, match="cannot be read"):
        last_end_ns(tmp_path / "none")


def test_the_library_decodes_by_decoders_that_were_made_at_import() -> None:
    """Its functions run in threads, and msgspec crashes where two of them are the first to decode a type."""
    for path in Path(kineto_trace.__file__).parent.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)]
        late = [
            call.lineno
            for call in calls
            if ast.unparse(call.func).startswith("msgspec.") and any(each.arg == "type" for each in call.keywords)
        ]
        assert not late, f"{path}, lines {late}: make a msgspec.json.Decoder of the type beside it"
