"""attachments.py: files beside the trace are joined as they came, and never called whole if they are not."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.spool.attachments import write_attachments
from kineto_trace.spool.raw_records import RawWriter
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES, ATTACHMENTS, STORED_NAMES, OutputFile
from support.trace_files.h200 import make_spool


def add_file(
    target_dir: Path,
    chunks: list[tuple[int, bytes]],
    *,
    source: str = "memory_snapshot",
    file: Any = "memory_snapshot",
    size: int | None = None,
    dropped: int = 0,
) -> None:
    directory = target_dir / "raw" / source
    with RawWriter(directory, source=source, format="file/1", metadata={"file": file}) as writer:
        for sequence, data in chunks:
            writer.append_buffer(data, sequence=sequence, records=1)
        told = {} if size is None else {"size_bytes": size}
        writer.finish(metadata=told, record_bytes={}, records=len(chunks), dropped=dropped)


def test_chunks_are_joined_in_the_order_of_their_sequence(tmp_path: Path) -> None:
    add_file(tmp_path, [(1, b"def"), (0, b"abc"), (2, b"g")], size=7)
    written = write_attachments(tmp_path)
    digest = hashlib.sha256(b"abcdefg").hexdigest()
    assert written.files == (OutputFile("memory-snapshot", "memory_snapshot.pickle", 7, digest),)
    assert (tmp_path / "memory_snapshot.pickle").read_bytes() == b"abcdefg"
    assert (written.cut, written.warnings, written.alone) == ((), (), True)


def test_a_file_ends_at_a_gap_and_is_called_cut(tmp_path: Path) -> None:
    add_file(tmp_path, [(0, b"abc"), (2, b"ghi")], size=9)
    written = write_attachments(tmp_path)
    assert (tmp_path / "memory_snapshot.pickle").read_bytes() == b"abc"
    assert written.cut == ("the memory-snapshot file is incomplete: 3 of 9 bytes are present",)


def test_a_source_that_never_came_to_its_end_left_a_cut_file(tmp_path: Path) -> None:
    add_file(tmp_path, [(0, b"abc")])
    assert write_attachments(tmp_path).cut == (
        "the memory-snapshot file is incomplete: it ends after 3 bytes, because its source did not finish",
    )


def test_a_file_that_the_source_itself_had_to_cut_is_called_cut(tmp_path: Path) -> None:
    add_file(tmp_path, [(0, b"abc")], size=3, dropped=1)
    assert "could not write all of it" in write_attachments(tmp_path).cut[0]


def test_a_file_of_which_nothing_came_is_missing_and_told(tmp_path: Path) -> None:
    add_file(tmp_path, [], size=9)
    written = write_attachments(tmp_path)
    assert written.files == ()
    assert written.cut == ("the memory-snapshot file is incomplete: 0 of 9 bytes are present",)
    assert not (tmp_path / "memory_snapshot.pickle").exists()


@pytest.mark.parametrize("kind", ["../../etc/passwd", "", 7, None])
def test_no_name_comes_from_the_target(tmp_path: Path, kind: Any) -> None:
    add_file(tmp_path, [(0, b"abc")], file=kind, size=3)
    written = write_attachments(tmp_path)
    assert written.files == ()
    assert written.warnings == (f"memory_snapshot: a file of the unknown kind {kind!r} is left out",)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_second_file_of_one_kind_does_not_replace_the_first(tmp_path: Path) -> None:
    add_file(tmp_path, [(0, b"abc")], source="first", size=3)
    add_file(tmp_path, [(0, b"xyz")], source="second", size=3)
    assert write_attachments(tmp_path).warnings == ("second: a second memory-snapshot file is left out",)
    assert (tmp_path / "memory_snapshot.pickle").read_bytes() == b"abc"


def test_files_alone_make_no_trace(tmp_path: Path) -> None:
    add_file(tmp_path, [(0, b"abc")], size=3)
    add_file(tmp_path, [(0, b"{}")], source="execution_trace", file="execution_trace", size=2)
    conversion = convert_target(tmp_path, formats=["chrome"])
    assert not conversion.traced
    assert {file.format for file in conversion.files} == {"memory-snapshot", "execution-trace"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["execution_trace.json", "memory_snapshot.pickle", "raw"]


def test_files_come_beside_a_trace(tmp_path: Path) -> None:
    target_dir = make_spool(tmp_path, "mlp-cupti26")
    add_file(target_dir, [(0, b"abc")], size=4)
    conversion = convert_target(target_dir, formats=["chrome"])
    assert conversion.traced
    assert [file.format for file in conversion.files] == ["chrome", "memory-snapshot"]
    assert conversion.cut == ("the memory-snapshot file is incomplete: 3 of 4 bytes are present",)
    assert not [warning for warning in conversion.warnings if "memory_snapshot" in warning]


def test_every_kind_has_a_name_of_its_own() -> None:
    assert set(ATTACHMENTS.values()) == set(ATTACHMENT_SUFFIXES)
    assert len(set(STORED_NAMES.values())) == len(STORED_NAMES)
