"""Records are decoded as their schema says, and what lies is counted."""

import struct
from typing import Any

import numpy as np
import pytest
from kineto_agent.protocol.records import CLOCK_PAIR, SPACE_CLOCK_PAIR
from kineto_agent.protocol.schema import FRAMINGS, HEADED, SIZE_FIELD, Schema, to_json
from kineto_trace.decode.declared_records import decode, decode_records, small_numbers
from kineto_trace.decode.decoded import DecodeWindow
from kineto_trace.decode.record_set import RecordSet
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from support.accelerators.npu import KERNEL, NAMES, NPU
from support.trace_files.declared import BASE, framed, packed, sized, source_of, texts

WINDOW = DecodeWindow(BASE, BASE + 10**9)
PUSHED = NPU._replace(framing=HEADED)


def kernel(schema: Schema = NPU, *, at: int = 100, length: int = 50, **values: Any) -> bytes:
    start = BASE + at
    return packed(schema, 1, **{"start": start, "end": start + length, "symbol": 7, **values})


@pytest.mark.parametrize("framing", FRAMINGS)
def test_records_of_every_framing_become_rows(framing: str) -> None:
    schema = sized(NPU) if framing == SIZE_FIELD else NPU._replace(framing=framing)
    schema.check()
    buffers = [
        kernel(schema, grid_x=4, regs=32, unit=1, queue=3, correlation=11) + kernel(schema, at=300, symbol=8),
        packed(schema, 3, begin=BASE + 10, took=20, fn=1, tid=77, id=11)
        + packed(schema, 2, start=BASE + 1, end=BASE + 5, why=1, label=b"input", load=12.5)
        + packed(schema, 4, at=BASE + 9, by=5),
    ]
    strings = StringTable()
    source = source_of(schema, buffers, strings={(NAMES, 7): b"_Z3addPf"})
    found = decode(source, strings, WINDOW)
    assert (found.records, found.undecoded, found.warnings) == (5, 0, ())
    kernels = found.tables["kernel"]
    assert texts(strings.strings, kernels["name"]) == ["add(float*)", "kernel 8"]
    assert kernels["start"].tolist() == [BASE + 100, BASE + 300]
    assert kernels["duration"].tolist() == [50, 50]
    rows = ("grid_x", "registers", "device", "stream", "correlation", "priority")
    assert [kernels[name].tolist()[0] for name in rows] == [4, 32, 1, 3, 11, -(2**31)]
    calls = found.tables["cuda_runtime"]
    assert found.categories == {"cuda_runtime": "npu_runtime"}
    assert texts(strings.strings, calls["name"]) == ["npuLaunch"]
    assert [calls[name].tolist() for name in ("duration", "thread", "correlation", "cbid")] == [[20], [77], [11], [1]]
    waits = found.tables["npu_wait"]
    assert [texts(strings.strings, waits[name]) for name in ("name", "why", "label")] == [
        ["wait"],
        ["a lock"],
        ["input"],
    ]
    assert (waits["weight"].tolist(), waits["load"].tolist(), waits["device"].tolist()) == ([-1], [12.5], [0])
    marks = found.tables["npu_mark"]
    assert (marks["duration"].tolist(), marks["thread"].tolist()) == ([0], [5])
    assert waits.declared is not None and waits.declared.meaning == "Waits of a queue."


def test_a_type_without_records_has_an_empty_table() -> None:
    found = decode(source_of(NPU, []), StringTable(), WINDOW)
    assert {kind: len(table) for kind, table in found.tables.items()} == {
        "kernel": 0, "cuda_runtime": 0, "npu_wait": 0, "npu_mark": 0,
    }  # fmt: skip


def test_handles_become_small_numbers_that_all_kinds_share() -> None:
    wait = NPU.records[2]._replace(fields={**NPU.records[2].fields, "load": ("Q", 48)}, stream="load")
    types = {**NPU.types, "npu_wait": NPU.types["npu_wait"]._replace(columns=())}
    schema = NPU._replace(records={**NPU.records, 2: wait._replace(constants={})}, types=types)
    schema.check()
    queues = [0x7F0000001000, 0x7F0000002000, (1 << 64) - 1]
    data = b"".join(kernel(schema, at=n, queue=queue) for n, queue in enumerate(queues))
    data += packed(schema, 2, start=BASE + 1, end=BASE + 2, load=0x7F0000002000)
    found = decode(source_of(schema, [data]), StringTable(), WINDOW)
    assert found.tables["kernel"]["stream"].tolist() == [0, 1, UNKNOWN_STREAM]
    assert found.tables["npu_wait"]["stream"].tolist() == [1]


def test_small_streams_keep_their_numbers() -> None:
    columns: list[np.ndarray[Any, Any]] = [np.array([5, 0, 7], np.uint64), np.array([-1], np.int32)]
    assert [column.tolist() for column in small_numbers(columns)] == [[5, 0, 7], [UNKNOWN_STREAM]]


def test_a_vendor_changes_columns_with_the_help_of_any_field() -> None:
    def amend(records: RecordSet) -> None:
        rows = records.rows[1]
        rows.columns["grid_x"] = rows.field("grid_x") // 2
        rows.keep(rows.columns["grid_x"] > 1)

    data = kernel(grid_x=8) + kernel(grid_x=2)
    found = decode_records(source_of(NPU, [data]), NPU, StringTable(), WINDOW, amend)
    assert found.tables["kernel"]["grid_x"].tolist() == [4]


# ------------------------------------------------------------ what lies


@pytest.mark.parametrize(
    ("data", "rows", "undecoded", "warning"),
    [
        (kernel(start=0), 0, 1, "1 record of kind 1 without a time"),
        (kernel(end=0), 0, 1, "1 record of kind 1 without a time"),
        (kernel(length=-20), 1, 0, "1 record of kind 1 with an end before the start: their duration is set to 0"),
        (kernel(end=(1 << 63) + 5), 0, 1, "1 record of kind 1 with impossible times"),
        (kernel(end=1 << 62), 0, 1, "1 record of kind 1 with times far from the recording"),
        (kernel(start=5), 0, 1, "1 record of kind 1 with times far from the recording"),
        (
            kernel() + struct.pack("<II", 77, 0) + bytes(56), 1, 2,
            "1 buffer could not be read past a record of unknown kind 77",
        ),
        (kernel() + kernel()[:40], 1, 1, "1 buffer could not be read past a truncated record"),
        (kernel() + b"\1", 1, 1, "1 buffer could not be read past a truncated record"),
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_counted(data: bytes, rows: int, undecoded: int, warning: str) -> None:
    found = decode(source_of(NPU, [data], counts={0: 1 << 60}), StringTable(), WINDOW)
    assert (len(found.tables["kernel"]), found.undecoded, found.warnings) == (rows, undecoded, (warning,))


def test_durations_of_any_length_do_no_harm() -> None:
    data = b"".join(
        packed(NPU, 3, begin=BASE, took=took, fn=1) for took in (-1, -(1 << 63), (1 << 63) - 1, 1 << 61, 0, 7)
    )
    found = decode(source_of(NPU, [data]), StringTable(), WINDOW)
    assert found.tables["cuda_runtime"]["duration"].tolist() == [0, 7]
    assert found.undecoded == 4


def test_kinds_that_are_not_declared_are_skipped_where_records_say_their_size() -> None:
    data = framed(PUSHED, 77, bytes(24)) + kernel(PUSHED) + framed(PUSHED, 0xFFFFFFFF, b"a text of the kit")
    found = decode(source_of(PUSHED, [data]), StringTable(), WINDOW)
    assert (len(found.tables["kernel"]), found.records, found.undecoded) == (1, 2, 1)
    assert found.warnings == ("1 record of kinds that the schema does not declare (77)",)


def test_records_that_are_shorter_than_declared_are_not_decoded_and_longer_ones_are() -> None:
    whole = kernel()
    data = framed(PUSHED, 1, whole[:40]) + framed(PUSHED, 1, whole + bytes(24))
    found = decode(source_of(PUSHED, [data]), StringTable(), WINDOW)
    assert (len(found.tables["kernel"]), found.undecoded) == (1, 1)
    assert found.warnings == ("1 record of kind 1 with fewer than the schema's 64 bytes",)


def test_a_size_that_the_collector_has_seen_and_the_schema_does_not_have_is_believed_for_the_walk_only() -> None:
    data = kernel() + bytes(8) + packed(NPU, 4, at=BASE + 1, by=1)
    found = decode(source_of(NPU, [data], record_bytes={1: 72}), StringTable(), WINDOW)
    assert (len(found.tables["kernel"]), len(found.tables["npu_mark"]), found.undecoded) == (0, 1, 1)
    assert found.warnings == ("1 record of kind 1 with 72 bytes instead of the schema's 64",)


@pytest.mark.parametrize("length", [0, 4, 12, 1 << 20, 0xFFFFFFF8])
def test_a_length_that_leads_nowhere_ends_the_buffer(length: int) -> None:
    data = kernel(PUSHED) + struct.pack("<II", 1, length) + bytes(64)
    found = decode(source_of(PUSHED, [data, kernel(PUSHED)]), StringTable(), WINDOW)
    assert len(found.tables["kernel"]) == 2
    assert 1 <= found.undecoded <= 9


@pytest.mark.parametrize("schema", [None, 3, {"version": 1}, {**to_json(NPU), "framing": "none"}])
def test_records_without_a_usable_schema_are_counted(schema: Any) -> None:
    source = source_of(NPU, [kernel()])
    source.metadata["schema"] = schema
    found = decode(source, StringTable(), WINDOW)
    assert (found.tables, found.undecoded) == ({}, 1)
    assert found.warnings[0].startswith("its records cannot be read: ")


def test_names_without_a_text_share_one_in_the_end() -> None:
    data = b"".join(kernel(symbol=n) for n in range(5000))
    strings = StringTable()
    decode(source_of(NPU, [data]), strings, WINDOW)
    assert len(strings.strings) == 4097
    assert strings.strings[-1] == "kernel …"


# ------------------------------------------------------------ clocks


def booted(*times: int) -> bytes:
    return b"".join(kernel(start=time, end=time + 1000) for time in times)


def test_offset_and_drift_of_a_clock_are_those_that_were_measured() -> None:
    schema = NPU._replace(clock="boottime")
    # A clock that is 0.01 % fast, as three samples of it say.
    pairs = {(SPACE_CLOCK_PAIR, BASE + s * 10**9): CLOCK_PAIR.pack(10**12 + s * 1_000_100_000) for s in range(3)}
    found = decode(source_of(schema, [booted(10**12 + 500_050_000)], strings=pairs), StringTable(), WINDOW)
    assert abs(found.tables["kernel"]["start"][0] - (BASE + 500_000_000)) <= 1
    assert (found.undecoded, found.warnings) == (0, ())


def test_samples_may_be_in_the_metadata() -> None:
    schema = NPU._replace(clock="monotonic")
    found = decode(source_of(schema, [booted(5_000)], clocks=[[BASE, 4_000]]), StringTable(), WINDOW)
    assert found.tables["kernel"]["start"].tolist() == [BASE + 1_000]
    header = [[BASE, 111, 4_000], [BASE + 10**9, 222, 4_000 + 10**9]]
    found = decode(source_of(schema, [booted(5_000)], clocks=header), StringTable(), WINDOW)
    assert found.tables["kernel"]["start"].tolist() == [BASE + 1_000]


@pytest.mark.parametrize("clocks", [None, [], "now", [[1]], [[BASE, -5]], [[True, False]], [[BASE, 1 << 70]]])
def test_times_of_a_clock_without_samples_are_not_guessed(clocks: Any) -> None:
    schema = NPU._replace(clock="boottime")
    found = decode(source_of(schema, [booted(5_000)], clocks=clocks), StringTable(), WINDOW)
    assert (len(found.tables["kernel"]), found.undecoded) == (0, 1)
    assert found.warnings == ("1 record of kind 1 with times of the clock boottime, which has no samples",)


def test_a_rate_that_no_clock_has_is_not_believed() -> None:
    schema = NPU._replace(clock="boottime")
    clocks = [[BASE, 1_000], [BASE + 10**9, 1_001]]
    found = decode(source_of(schema, [booted(1_500)], clocks=clocks), StringTable(), WINDOW)
    assert found.tables["kernel"]["start"].tolist() == [BASE + 500]
    assert "% off, which is impossible, so only its first sample is used" in found.warnings[0]


def test_a_devices_clock_is_that_of_its_own_readings() -> None:
    reading = NPU.records[9]._replace(size=32, fields={**NPU.records[9].fields, "unit": ("I", 24)}, device="unit")
    schema = NPU._replace(clock="device", records={**NPU.records, 9: reading})
    schema.check()
    data = b"".join(
        packed(schema, 9, unit=unit, ticks=first + s * 10**9 // tick, unix=BASE + s * 10**9)
        for unit, first, tick in ((0, 1_000, 10), (1, 500_000, 4))
        for s in range(2)
    )
    data += kernel(unit=0, start=2_000, end=2_010) + kernel(unit=1, start=501_000, end=501_010)
    data += kernel(unit=2, start=501_000, end=501_010)
    found = decode(source_of(schema, [data]), StringTable(), WINDOW)
    kernels = found.tables["kernel"]
    assert kernels["start"].tolist() == [BASE + 10_000, BASE + 4_000]
    assert kernels["duration"].tolist() == [100, 40]
    assert found.undecoded == 1  # of the device without readings


def test_a_single_reading_gives_the_offset_and_the_schema_the_length_of_a_tick() -> None:
    schema = NPU._replace(clock="device", tick_ns=2.5)
    data = packed(schema, 9, ticks=1_000, unix=BASE) + kernel(start=1_100, end=1_200)
    found = decode(source_of(schema, [data]), StringTable(), WINDOW)
    assert found.tables["kernel"]["start"].tolist() == [BASE + 250]
    assert found.tables["kernel"]["duration"].tolist() == [250]


def test_kernels_with_their_own_clock_stand_beside_calls_in_unix_time() -> None:
    schema = NPU._replace(records={**NPU.records, 1: KERNEL._replace(clock="boottime")})
    data = booted(5_000) + packed(schema, 3, begin=BASE, took=5, fn=1)
    found = decode(source_of(schema, [data], clocks=[[BASE, 4_000]]), StringTable(), WINDOW)
    assert found.tables["kernel"]["start"].tolist() == [BASE + 1_000]
    assert found.tables["cuda_runtime"]["start"].tolist() == [BASE]
