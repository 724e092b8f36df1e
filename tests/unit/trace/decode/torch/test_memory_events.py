"""decode/memory_events.py: rows, sizes and running totals of allocator actions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineto_agent.protocol.records import (
    MEMORY_ALLOCATED,
    MEMORY_EVENT,
    MEMORY_FREED,
    MEMORY_OUT_OF_MEMORY,
    MEMORY_RELEASED,
    MEMORY_RESERVED,
)
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.torch.memory_events import decode
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import StringTable
from kineto_trace.open.raw_target import load_target
from kineto_trace.spool.raw_records import RawWriter, read_source

EVENTS = [
    (1000, 16, 4096, 0, 0, MEMORY_RESERVED),
    (2000, 16, 100, 0, 0, MEMORY_ALLOCATED),
    (3000, 32, 50, 0, 1, MEMORY_ALLOCATED),
    (4000, 64, 10, 0, 0, MEMORY_ALLOCATED),
    (5000, 16, 100, 0, 0, MEMORY_FREED),
    (6000, 0, 999, 0, 0, MEMORY_OUT_OF_MEMORY),
    (7000, 16, 1024, 0, 0, MEMORY_RELEASED),
]


def spool(directory: Path, events: Sequence[tuple[int, ...]], metadata: dict[str, Any]) -> None:
    with RawWriter(directory, source="memory_events", format="memory_events/1", metadata=metadata) as writer:
        data = b"".join(MEMORY_EVENT.pack(*event) for event in events)
        writer.append_buffer(data, sequence=0, records=len(events))
        writer.finish(metadata={}, record_bytes={}, records=len(events), dropped=0)


def decoded(tmp_path: Path, events: Sequence[tuple[int, ...]], **metadata: Any) -> tuple[Decoded, list[str]]:
    strings = StringTable()
    spool(tmp_path, events, metadata)
    return decode(read_source(tmp_path), strings), strings.strings


def test_rows_have_signed_sizes_and_the_totals_afterwards(tmp_path: Path) -> None:
    events, strings = decoded(tmp_path, EVENTS, totals={"0": [17, 8192], "1": [50, 2048]})
    table = events.tables["cpu_instant_event"]
    assert [strings[name] for name in table["name"]] == ["[memory]"] * 4 + ["[OutOfMemory]"]
    assert table["start"].tolist() == [2000, 3000, 4000, 5000, 6000]
    assert table["bytes"].tolist() == [100, 50, 10, -100, 999]
    assert table["total_allocated"].tolist() == [107, 50, 117, 17, 17]
    assert table["total_reserved"].tolist() == [9216, 2048, 9216, 9216, 9216]
    assert table["device"].tolist() == [0, 1, 0, 0, 0]
    assert set(table["device_type"].tolist()) == {1}
    assert table["address"].tolist() == [16, 32, 64, 16, 0]
    assert events.undecoded == 0


def test_totals_that_no_device_can_have_are_unknown(tmp_path: Path) -> None:
    events, _ = decoded(tmp_path, EVENTS, totals={"0": [2**64, 0], "1": [50, 2**63]})
    assert events.tables["cpu_instant_event"]["total_allocated"].tolist() == [-1] * 5


def test_without_totals_they_are_unknown(tmp_path: Path) -> None:
    events, _ = decoded(tmp_path, EVENTS, totals={"0": "much", "1": [1]})
    assert set(events.tables["cpu_instant_event"]["total_allocated"].tolist()) == {-1}
    assert set(events.tables["cpu_instant_event"]["total_reserved"].tolist()) == {-1}


def test_a_contradiction_is_no_negative_total(tmp_path: Path) -> None:
    events, _ = decoded(tmp_path, EVENTS, totals={"0": [0, 0], "1": [0, 0]})
    assert min(events.tables["cpu_instant_event"]["total_allocated"].tolist()) >= -1


def test_unknown_actions_and_mad_sizes_are_counted(tmp_path: Path) -> None:
    events, _ = decoded(tmp_path, [(1, 1, 1, 0, 0, 77), (1, 1, 1 << 63, 0, 0, MEMORY_FREED), EVENTS[1]], totals={})
    assert (len(events.tables["cpu_instant_event"]), events.undecoded) == (1, 2)


def test_no_records_are_an_empty_table(tmp_path: Path) -> None:
    events, strings = decoded(tmp_path, [], totals={})
    assert (len(events.tables["cpu_instant_event"]), strings) == (0, [])


def test_a_target_with_allocation_events_has_their_rows_in_the_window(tmp_path: Path) -> None:
    spool(tmp_path / "raw" / "memory_events", EVENTS, {"totals": {"0": [17, 8192]}})
    info = TargetInfo(
        capture_id="c", host="h", pid=7, process_name="p", window_start_ns=2500, window_end_ns=5500, complete=True
    )
    info.write(tmp_path)
    assert load_target(tmp_path).trace.table("cpu_instant_event")["bytes"].tolist() == [50, 10, -100]
