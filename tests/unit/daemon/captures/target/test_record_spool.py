"""What the spool counts as recorded."""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.protocol import arena, wire
from kineto_agent.protocol.records import (
    DECLARED_FORMAT,
    PYTHON_STACKS_FORMAT,
    STACK_SAMPLE,
    STEP_MARK,
    STEP_MARKS_FORMAT,
)
from kineto_agent.protocol.schema import SCHEMA_KEY, to_json
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.decode.declared_records import decode
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import read_source
from kinetod.captures.target.record_spool import (
    ArenaCounts,
    ArenaReader,
    BadArena,
    Spool,
    StoreLost,
    noted_ways,
    source_counts,
)
from support.accelerators.npu import NPU
from support.trace_files.declared import BASE

RECORD = struct.Struct("<Q")
LIMIT = 64 << 20
GOOD = dict(
    zip(
        arena.FIXED_FIELDS,
        (arena.MAGIC, 4096, 2, 4096, 4096, 8192, 4096, 12288, 20480),
        strict=True,
    )
)


class Sink:
    def __init__(self, fail_at: int = -1) -> None:
        self.buffers: list[tuple[int, int, bytes]] = []
        self.strings = b""
        self._fail_at = fail_at

    def append_buffer(self, data: memoryview, *, sequence: int, records: int) -> None:
        if len(self.buffers) == self._fail_at:
            raise OSError(28, "No space left on device")
        self.buffers.append((sequence, records, bytes(data)))

    def append_strings(self, data: memoryview) -> None:
        self.strings += bytes(data)


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter("test", 4 * 64 * 1024, 4096)
    yield made
    made.close()


def reader_of(writer: ArenaWriter) -> ArenaReader:
    return ArenaReader(os.dup(writer.fd), max_buffer_bytes=LIMIT)


def raw_arena(seal: bool = True, **changes: object) -> int:
    """A memfd with this header."""
    fields = {**GOOD, **changes}
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 20480)
    os.pwrite(fd, arena.FIXED.pack(*(fields[name] for name in arena.FIXED_FIELDS)), 0)
    if seal:
        fcntl.fcntl(fd, 1033, 0x2 | 0x4)
    return fd


def test_ready_buffers_come_in_order_and_are_free_again(writer: ArenaWriter) -> None:
    reader, sink = reader_of(writer), Sink()
    for number in range(12):  # three times as many as there are buffers
        writer.append(RECORD, number)
        writer.publish()
        if number % 4 == 3:
            reader.drain(sink)
    assert [(sequence, records) for sequence, records, _ in sink.buffers] == [(each, 1) for each in range(12)]
    assert [RECORD.unpack(data)[0] for _, _, data in sink.buffers] == list(range(12))
    assert reader.counts() == (reader.counts().__class__(12, 96, 0))
    assert reader.copied_bytes == 96
    reader.close()
    reader.close()


def test_strings_are_copied_once_and_before_the_buffers_that_need_them(writer: ArenaWriter) -> None:
    reader, sink = reader_of(writer), Sink()
    writer.intern(1, 3, b"one")
    reader.drain(sink)
    first = sink.strings
    writer.intern(2, 3, b"two")
    reader.drain(sink)
    reader.drain(sink)
    assert sink.strings.startswith(first)
    assert sink.strings == struct.pack("<QII8sQII8s", 1, 3, 3, b"one", 2, 3, 3, b"two")
    reader.close()


def test_completed_buffers_count_only_once_the_target_is_dead(writer: ArenaWriter) -> None:
    reader, sink = reader_of(writer), Sink()
    writer.append(RECORD, 1)
    writer.publish()
    os.pwrite(writer.fd, struct.pack("<I", arena.COMPLETED), arena.HEADER_BYTES + arena.STATE)
    reader.drain(sink)
    assert sink.buffers == []
    reader.drain(sink, target_is_dead=True)
    assert [(sequence, data) for sequence, _, data in sink.buffers] == [(0, RECORD.pack(1))]
    reader.close()


def test_what_a_failed_write_leaves_is_still_there(writer: ArenaWriter) -> None:
    reader, sink = reader_of(writer), Sink(fail_at=1)
    for number in range(3):
        writer.append(RECORD, number)
        writer.publish()
    with pytest.raises(OSError, match="No space left"):
        reader.drain(sink)
    rest = Sink()
    reader.drain(rest)
    assert [sequence for sequence, _, _ in sink.buffers + rest.buffers] == [0, 1, 2]
    reader.close()


def test_a_drain_stops_at_its_limit(writer: ArenaWriter) -> None:
    reader, sink = reader_of(writer), Sink()
    for number in range(3):
        writer.append(RECORD, number)
        writer.publish()
    reader.drain(sink, max_bytes=9)
    assert len(sink.buffers) == 2
    reader.close()


def test_lengths_beyond_the_buffer_are_cut(writer: ArenaWriter) -> None:
    reader, sink = reader_of(writer), Sink()
    writer.append(RECORD, 1)
    writer.publish()
    words = (arena.BUFFER_VALID_BYTES, arena.BUFFER_SEQUENCE, arena.BUFFER_RECORDS)
    for offset in (*(arena.HEADER_BYTES + word for word in words), arena.STRINGS_USED, arena.RECORDS):
        os.pwrite(writer.fd, b"\xff" * 8, offset)
    reader.drain(sink)
    ((sequence, records, data),) = sink.buffers
    assert (sequence, records, len(data)) == (2**63 - 2, 65536, 65536)
    assert len(sink.strings) == 4096
    assert reader.counts().records == 2**63 - 1
    reader.close()


def test_a_good_header_is_taken() -> None:
    reader = ArenaReader(raw_arena(), max_buffer_bytes=LIMIT)
    assert reader.counts().records == 0
    reader.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"magic": b"KINETOA2"}, "magic"),
        ({"header_bytes": 64}, "header"),
        ({"total_bytes": 4096}, "size differs from what its header says"),
        ({"buffer_count": 0}, "number of buffers"),
        ({"buffer_count": 1 << 31}, "number of buffers"),
        ({"buffer_bytes": 0}, "buffer size"),
        ({"buffer_bytes": 1 << 63}, "buffer size"),
        ({"descriptors_offset": 0}, "descriptors are misplaced"),
        ({"descriptors_offset": 8190}, "descriptors are misplaced"),
        ({"descriptors_offset": 8184}, "descriptors are misplaced"),
        ({"strings_offset": 8193}, "strings overlap"),
        ({"strings_bytes": 8192}, "strings overlap"),
        ({"strings_bytes": 1 << 40}, "string table is too large"),
        ({"buffers_offset": 16384}, "buffers are misplaced"),
        ({"buffers_offset": (1 << 64) - 8192}, "buffers are misplaced"),
    ],
)
def test_a_header_that_lies_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadArena, match=problem):
        ArenaReader(raw_arena(**changes), max_buffer_bytes=LIMIT)


def test_buffers_beyond_the_request_are_refused() -> None:
    with pytest.raises(BadArena, match="larger than the request allows"):
        ArenaReader(raw_arena(), max_buffer_bytes=8191)


def test_memory_that_could_shrink_is_refused_and_its_descriptor_closed() -> None:
    fd = raw_arena(seal=False)
    with pytest.raises(BadArena, match="its size is not sealed"):
        ArenaReader(fd, max_buffer_bytes=LIMIT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_pipe_is_no_arena() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(BadArena, match="it is not a memfd"):
        ArenaReader(read_end, max_buffer_bytes=LIMIT)
    os.close(write_end)


def test_a_memfd_without_room_for_a_header_is_no_arena() -> None:
    fd = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)
    with pytest.raises(BadArena, match="it has only 0 bytes"):
        ArenaReader(fd, max_buffer_bytes=LIMIT)


def test_a_source_says_how_it_records() -> None:
    ways = noted_ways({"torch_ops": {"way": "observer, torch 2.13.0"}, "cupti": {"version": 26}})
    counts = {
        "torch_ops": ArenaCounts(records=3, bytes=192, dropped=1),
        "cupti": ArenaCounts(records=2, bytes=100, dropped=0),
    }
    assert source_counts(counts, ways) == [
        pb.SourceCounts(source="torch_ops", records=3, bytes=192, dropped=1, way="observer, torch 2.13.0"),
        pb.SourceCounts(source="cupti", records=2, bytes=100),
    ]


def test_what_is_no_text_is_not_believed_and_text_is_made_safe() -> None:
    assert noted_ways({"a": {"way": 5}, "b": {"way": ["x"]}, "c": {"way": ""}}) == {}
    assert noted_ways({"a": {"way": "observer\x1b[31m\n\ud800" + "x" * 300}})["a"].startswith("observer [31m ?xxx")
    assert len(noted_ways({"a": {"way": "x" * 300}})["a"]) == 200


@pytest.mark.parametrize(
    ("name", "format", "layout", "counted"),
    [("steps", STEP_MARKS_FORMAT, STEP_MARK, 0), ("python_stacks", PYTHON_STACKS_FORMAT, STACK_SAMPLE, 24)],
)
def test_a_target_of_which_only_iterations_are_known_has_recorded_nothing(
    tmp_path: Path, name: str, format: str, layout: object, counted: int
) -> None:
    writer = ArenaWriter(name, 1 << 16, 0)
    writer.append(layout, *[1] * (4 if name == "steps" else 5))  # type: ignore[arg-type]
    writer.finish()
    spool = Spool(
        tmp_path, buffer_limit_bytes=1 << 20, max_trace_bytes=1 << 20, min_free_bytes=0, free_bytes=lambda: 1 << 30
    )
    spool.open(wire.Arena("c1", name, format, {}), os.dup(writer.fd))
    spool.drain(last=True)
    assert (spool.counts()[name].records, spool.copied_bytes()) == (1, counted)
    spool.close()
    writer.close()


def test_the_time_in_which_records_were_dropped_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100, 200, 300, 400, 500, 600])
    monkeypatch.setattr("kinetod.captures.target.record_spool.time.time_ns", lambda: next(times))
    writer = ArenaWriter("torch_ops", 1 << 16, 0)
    spool = Spool(
        tmp_path, buffer_limit_bytes=1 << 20, max_trace_bytes=1 << 20, min_free_bytes=0, free_bytes=lambda: 1 << 30
    )
    spool.open(wire.Arena("c1", "torch_ops", "torch_ops/1", {}), os.dup(writer.fd))  # at 100
    for dropped in (0, 3, 1, 0, 2):  # before the drains at 200, 300, …
        for _ in range(dropped):
            writer.drop()
        spool.drain(last=True)
    spool.finish({"torch_ops": {"covered_ns": [100, 600]}})
    source = read_source(tmp_path / "raw" / "torch_ops")
    assert (source.metadata["covered_ns"], source.metadata["losing_ns"]) == ([100, 600], [[200, 400], [500, 600]])
    assert source.dropped == 6
    spool.close()
    writer.close()


def open_arenas() -> int:
    links = list(Path("/proc/self/fd").iterdir())
    return sum("kineto" in str(link.readlink()) for link in links if link.is_symlink())


def test_an_arena_is_let_go_of_when_the_spool_is_closed_or_cannot_be_made(tmp_path: Path) -> None:
    writer, before = ArenaWriter("torch_ops", 1 << 16, 0), open_arenas()
    spool = Spool(
        tmp_path, buffer_limit_bytes=1 << 20, max_trace_bytes=1 << 20, min_free_bytes=0, free_bytes=lambda: 1 << 30
    )
    arena = wire.Arena("c1", "torch_ops", "torch_ops/1", {})
    (tmp_path / "raw").touch()
    with pytest.raises(StoreLost):
        spool.open(arena, os.dup(writer.fd))
    assert open_arenas() == before
    (tmp_path / "raw").unlink()
    spool.open(arena, os.dup(writer.fd))
    assert open_arenas() > before
    spool.close()
    assert open_arenas() == before
    writer.close()


def test_clock_samples_of_a_source_stay_where_the_arena_has_none(tmp_path: Path) -> None:
    schema = NPU._replace(clock="boottime")
    writer = ArenaWriter("npu", 1 << 16, 0)
    spool = Spool(
        tmp_path, buffer_limit_bytes=1 << 20, max_trace_bytes=1 << 20, min_free_bytes=0, free_bytes=lambda: 1 << 30
    )
    metadata = {SCHEMA_KEY: to_json(schema), "clocks": [[BASE, 4_000]]}
    spool.open(wire.Arena("c1", "npu", DECLARED_FORMAT, metadata), os.dup(writer.fd))
    writer.append(struct.Struct("<IIQII"), 4, 0, 5_000, 7, 0)  # a record of the kind 4
    writer.finish()
    spool.drain(last=True)
    spool.finish({"npu": {}})
    spool.close()
    writer.close()
    found = decode(read_source(tmp_path / "raw" / "npu"), StringTable())
    assert found.tables["npu_mark"]["start"].tolist() == [BASE + 1_000]
    assert (found.undecoded, found.warnings) == (0, ())
