"""What the spool counts as recorded."""

import os
import struct
from pathlib import Path

import pytest
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import (
    DECLARED_FORMAT,
    PYTHON_STACKS_FORMAT,
    STACK_SAMPLE,
    STEP_MARK,
    STEP_MARKS_FORMAT,
)
from kineto_agent.protocol.schema import SCHEMA_KEY, to_json
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_trace.decode.declared_records import decode
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import read_source
from kinetod.captures.target.record_spool import Spool, StoreLost
from support.accelerators.npu import NPU
from support.trace_files.declared import BASE


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
