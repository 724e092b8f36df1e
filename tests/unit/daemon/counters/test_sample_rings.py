"""A ring between two sides of which each may be hostile."""

import fcntl
import mmap
import os
import struct

import numpy as np
import pytest
from kineto_trace.spool.counter_samples import row_type
from kinetod.counters.sample_rings import HEADER_BYTES, RingError, RingReader, RingWriter

METRICS = 3
ROW_BYTES = row_type(METRICS).itemsize
ROWS = 8
# Offsets in kn_ring, daemon/native_counters/sample_ring.h.
MAGIC, ABI, METRIC_COUNT, ROW, CAPACITY, READ, WRITTEN = 0, 4, 8, 12, 16, 32, 40
VALUES = np.arange(METRICS, dtype=np.float32)


def ring() -> RingWriter:
    return RingWriter(METRICS, most_ns=10**9, size=HEADER_BYTES + ROWS * ROW_BYTES)


def reader(writer: RingWriter, metrics: int = METRICS) -> RingReader:
    return RingReader(os.dup(writer.descriptor), metrics)


def scribble(writer: RingWriter, offset: int, value: int, form: str = "<Q") -> None:
    """As the other side could."""
    with mmap.mmap(writer.descriptor, HEADER_BYTES) as memory:
        struct.pack_into(form, memory, offset, value)


def test_rows_arrive_in_order_around_the_end_of_the_ring() -> None:
    writer = ring()
    reading = reader(writer)
    seen = []
    for number in range(5 * ROWS):
        assert writer.put(number, number + 1, VALUES + number)
        if number % 5 == 4:
            seen += [(int(row["start_ns"]), row["values"].tolist()) for row in reading.take()]
    assert seen == [(number, [number, number + 1, number + 2]) for number in range(5 * ROWS)]
    reading.close()
    writer.close()


def test_a_full_ring_drops_and_counts_the_newest_rows() -> None:
    writer = ring()
    reading = reader(writer)
    assert [writer.put(number, number + 1, VALUES) for number in range(ROWS + 2)] == [True] * ROWS + [False] * 2
    assert (reading.status().written, reading.status().dropped) == (ROWS, 2)
    assert len(reading.take()) == ROWS
    assert writer.put(100, 101, VALUES)
    writer.close()
    reading.close()


@pytest.mark.parametrize("read", [2**63, 2**64 - 1, 5])
def test_a_reader_that_lies_about_what_it_has_read_makes_the_writer_drop_and_no_more(read: int) -> None:
    writer = ring()
    for number in range(3):
        writer.put(number, number + 1, VALUES)
    scribble(writer, READ, read)
    assert not writer.put(3, 4, VALUES)
    writer.close()


@pytest.mark.parametrize(("offset", "form"), [(METRIC_COUNT, "<I"), (ROW, "<I"), (CAPACITY, "<Q"), (WRITTEN, "<Q")])
def test_a_writer_goes_by_its_own_layout_whatever_the_reader_writes_into_the_header(offset: int, form: str) -> None:
    writer = ring()
    scribble(writer, offset, 2**31, form)
    for number in range(ROWS):
        assert writer.put(number, number + 1, VALUES)
    assert not writer.put(ROWS, ROWS + 1, VALUES)
    with mmap.mmap(writer.descriptor, HEADER_BYTES + ROWS * ROW_BYTES) as memory:
        rows = np.frombuffer(memory, dtype=row_type(METRICS), offset=HEADER_BYTES)["start_ns"].tolist()
    assert rows == list(range(ROWS))
    writer.close()


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (MAGIC, "<I", 0),
        (ABI, "<I", 99),
        (METRIC_COUNT, "<I", METRICS + 1),
        (ROW, "<I", 8),
        (CAPACITY, "<Q", 2**40),
        (WRITTEN, "<Q", 2**40),
    ],
)
def test_a_reader_takes_nothing_from_a_header_that_makes_no_sense(offset: int, form: str, value: int) -> None:
    writer = ring()
    reading = reader(writer)
    scribble(writer, offset, value, form)
    with pytest.raises(RingError, match="is damaged"):
        reading.take()
    reading.close()
    writer.close()


def test_a_ring_of_other_metrics_is_refused() -> None:
    writer = ring()
    for metrics in (METRICS + 1, 0, 65):
        with pytest.raises(RingError, match="is damaged"):
            reader(writer, metrics)
    writer.close()


def test_memory_that_could_change_its_size_is_refused() -> None:
    unsealed = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 16)
    with pytest.raises(RingError, match="can be resized"):
        RingReader(unsealed, METRICS)
    pipe, other = os.pipe()
    os.close(other)
    with pytest.raises(RingError, match="is not shared memory"):
        RingReader(pipe, METRICS)
    huge = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(huge, 1 << 30)
    fcntl.fcntl(huge, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(RingError, match="its size is invalid"):
        RingReader(huge, METRICS)


def test_a_stop_wakes_the_writer_at_once() -> None:
    writer = ring()
    reading = reader(writer)
    assert not writer.wait(0.001)
    reading.stop()
    assert writer.wait(3600)
    writer.close()
    reading.close()
    reading.stop()  # harmless afterwards


def test_a_ring_without_room_for_a_row_is_refused() -> None:
    with pytest.raises(OSError, match="has no room for 64 metrics"):
        RingWriter(64, most_ns=1, size=HEADER_BYTES + 8)
