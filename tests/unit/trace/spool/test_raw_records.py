import json
import os
import struct
from pathlib import Path

import pytest
from kineto_trace.errors import SpoolError
from kineto_trace.spool.raw_records import RawWriter, read_source, source_directories
from support.machine.descriptors import open_files
from support.trace_files.h200 import string_entry


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
    assert [bytes(source.data[c.offset : c.offset + c.size]) for c in source.chunks] == [b"abc", b"", b"12345678"]
    assert [(c.sequence, c.records) for c in source.chunks] == [(0, 3), (1, 0), (2, 8)]
    assert source.metadata == {"cupti_version": 26, "flushes": 3}
    assert source.record_bytes == {5: 40}
    assert (source.records, source.dropped, source.torn) == (11, 2, 0)
    assert source.text(2, 5) == "cudaFree"
    assert source.text(2, 6) is None


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
