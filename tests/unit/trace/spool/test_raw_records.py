import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.errors import SpoolError
from kineto_trace.spool.raw_records import RawWriter, read_source, source_directories, write_attachments
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES, ATTACHMENTS, STORED_NAMES, OutputFile
from support.machine.descriptors import open_files
from support.trace_files.h200 import make_spool, string_entry


def write(directory: Path, payloads: list[bytes], strings: bytes = b"") -> RawWriter:
    writer = RawWriter(directory, source="cupti", format="cupti/1", metadata={"cupti_version": 26})
    for sequence, payload in enumerate(payloads):
        writer.append_buffer(payload, sequence=sequence, records=len(payload))
    writer.append_strings(strings)
    return writer


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    with write(tmp_path, [b"abc", b"", b"12345678"], string_entry(5, 2, b"cudaFree")) as writer:
        writer.finish(metadata={"flushes": 3}, record_bytes={5: 40}, records=11, dropped=2)
    source = read_source(tmp_path)
    assert [*source.buffers()] == [b"abc", b"", b"12345678"]
    assert [(c.sequence, c.records) for c in source.chunks] == [(0, 3), (1, 0), (2, 8)]
    assert source.metadata == {"cupti_version": 26, "flushes": 3}
    assert source.record_bytes == {5: 40}
    assert (source.records, source.dropped, source.torn) == (11, 2, 0)
    assert source.strings == {2: {5: b"cudaFree"}}


def test_bytes_written_counts_headers_padding_and_strings(tmp_path: Path) -> None:
    with write(tmp_path, [b"abc"], b"12345678") as writer:
        assert writer.bytes_written == 32 + 8 + 8


def test_source_json_is_there_from_the_announcement_on(tmp_path: Path) -> None:
    with write(tmp_path, []):
        values = json.loads((tmp_path / "source.json").read_text())
    assert values == {
        "source": "cupti",
        "format": "cupti/1",
        "metadata": {"cupti_version": 26},
        "record_bytes": {},
        "records": 0,
        "dropped": 0,
        "bytes": 0,
    }


def test_a_memoryview_of_wider_items_is_written_as_bytes(tmp_path: Path) -> None:
    with RawWriter(tmp_path, source="s", format="f", metadata={}) as writer:
        writer.append_buffer(memoryview(struct.pack("<2Q", 1, 2)).cast("Q"), sequence=0, records=2)
    assert read_source(tmp_path).chunks[0].size == 16


@pytest.mark.parametrize("cut", [1, 10, 39])
def test_a_torn_last_chunk_is_left_out_and_counted(tmp_path: Path, cut: int) -> None:
    write(tmp_path, [b"abcdefgh", b"12345678"]).close()
    whole = (tmp_path / "buffers.bin").read_bytes()
    (tmp_path / "buffers.bin").write_bytes(whole[:-cut])
    source = read_source(tmp_path)
    assert (len(source.chunks), source.torn) == (1, 1)


def test_a_torn_last_string_is_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, [], string_entry(1, 0, b"whole") + string_entry(2, 0, b"torn off")[:-3]).close()
    source = read_source(tmp_path)
    assert (source.strings, source.torn) == ({0: {1: b"whole"}}, 1)


def test_chunks_come_in_the_order_of_their_sequence(tmp_path: Path) -> None:
    with RawWriter(tmp_path, source="s", format="f", metadata={}) as writer:
        writer.append_buffer(b"second", sequence=9, records=1)
        writer.append_buffer(b"first", sequence=4, records=1)
    assert [chunk.sequence for chunk in read_source(tmp_path).chunks] == [4, 9]


def test_a_source_whose_files_were_never_made_is_empty(tmp_path: Path) -> None:
    write(tmp_path, []).close()
    (tmp_path / "buffers.bin").unlink()
    (tmp_path / "strings.bin").unlink()
    source = read_source(tmp_path)
    assert (source.chunks, source.strings) == ((), {})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"source": 5}', '{"source": "s", "format": "f"}'])
def test_a_damaged_source_json_is_a_spool_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, []).close()
    (tmp_path / "source.json").write_text(text)
    with pytest.raises(SpoolError, match=r"source\.json"):
        read_source(tmp_path)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    with write(tmp_path, []) as writer, Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), writer._buffers)
        with pytest.raises(OSError, match="No space left"):
            writer.append_buffer(b"x", sequence=0, records=1)


def test_sources_are_the_folders_under_raw(tmp_path: Path) -> None:
    assert source_directories(tmp_path) == []
    for name in ("python_stacks", "cupti"):
        write(tmp_path / "raw" / name, []).close()
    assert [path.name for path in source_directories(tmp_path)] == ["cupti", "python_stacks"]


def test_a_writer_that_cannot_begin_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "source.json").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError, match="directory"):
        RawWriter(tmp_path, source="cupti", format="cupti/1", metadata={})
    assert [name for name in open_files(os.getpid()).values() if name.startswith(str(tmp_path))] == []


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
    assert written.warnings == (f"memory_snapshot: a file of unknown kind {kind!r} is left out",)
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
