"""What ends up in the arena: counts, names, sizes, recycling, limits."""

import fcntl
import mmap
import os
import struct
import threading
import time

import pytest
from kineto_agent.protocol import arena
from kineto_agent.protocol.records import SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API
from kineto_agent.system.threads import thread_names
from support.agent.arenas import ArenaReader, Recycler, count_kinds
from support.agent.collector import LONG_MS, MIB, calling, fake_cuda, own_warnings, recording, request, source
from support.waiting import until

KERNEL, RUNTIME, DRIVER, MEMCPY, MEMSET, SYNC = 10, 5, 4, 1, 2, 38
ENOUGH = 1 << 30
DEFAULT_LIMIT = 128 << 20


def wait_for_ready(reader: ArenaReader, buffers: int, seconds: float = 10) -> None:
    until(
        lambda: reader.word(arena.SEQUENCE) >= buffers,
        f"{buffers} buffers became READY, not only",
        seconds,
        state=lambda: reader.word(arena.SEQUENCE),
    )


def test_every_record_is_there_once() -> None:
    cuda = fake_cuda()
    with recording() as (session, reader):
        cuda.launch("gemm", count=1000)
        cuda.driver_launch("triton_kernel")
        cuda.graph_launch(["a", "b", "c"])
        cuda.memcpy()
        cuda.memset()
        cuda.sync()
        outcome = session.stop()
        counted = count_kinds(reader.ready(), reader.record_bytes())
    assert counted == {KERNEL: 1004, RUNTIME: 1004, DRIVER: 1, MEMCPY: 1, MEMSET: 1, SYNC: 1}
    assert outcome.counts.records == 2012
    assert outcome.counts.dropped == 0


@pytest.mark.parametrize("types", [["kernel", "gpu_memcpy", "gpu_memset"], ["gpu_memcpy", "gpu_memset"]])
def test_copies_and_sets_are_enabled_while_kernels_are(types: list[str]) -> None:
    cuda = fake_cuda()
    misused = cuda.misused
    with recording(types) as (session, reader):
        cuda.launch()
        cuda.memcpy()
        session.stop()
        recorded = reader.record_bytes()
    assert cuda.misused == misused
    assert (KERNEL in recorded, MEMCPY in recorded) == ("kernel" in types, True)


@pytest.mark.parametrize(("version", "kernel_bytes"), [(26, 208), (130001, 216)])
def test_record_sizes_are_observed(version: int, kernel_bytes: int) -> None:
    cuda = fake_cuda(version=version)
    with recording() as (session, reader):
        cuda.launch()
        cuda.memcpy()
        cuda.memset()
        cuda.driver_launch()
        cuda.sync()
        session.stop()
        sizes = reader.record_bytes()
    assert sizes == {KERNEL: kernel_bytes, RUNTIME: 40, DRIVER: 40, MEMCPY: 96, MEMSET: 88, SYNC: 56}


def test_names_are_in_the_string_table() -> None:
    cuda = fake_cuda()
    long_name = "void kernel<" + "float, " * 1000 + ">"
    with recording() as (session, reader):
        cuda.launch("gemm", count=3)
        cuda.launch(long_name)
        session.stop()
        strings = reader.strings()
        records = [r for b in reader.ready() for r in _kernels(b.data)]
    named = [strings[SPACE_KERNEL_NAME, int.from_bytes(record[104:112], "little")] for record in records]
    assert named == ["gemm", "gemm", "gemm", long_name]
    assert strings[SPACE_RUNTIME_API, 211] == "cudaLaunchKernel_v7000"
    assert strings[SPACE_DRIVER_API, 307] == "cuLaunchKernel"


def _kernels(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        kind = int.from_bytes(data[at : at + 4], "little")
        size = {KERNEL: 216, RUNTIME: 40}[kind]
        if kind == KERNEL:
            found.append(data[at : at + size])
        at += size
    return found


def test_calls_of_no_interest_are_not_recorded() -> None:
    cuda = fake_cuda()
    with recording(["cuda_runtime", "cuda_driver"]) as (session, reader):
        cuda.launch()
        cuda.driver_launch()
        session.stop()
        cbids = [int.from_bytes(b.data[i + 4 : i + 8], "little") for b in reader.ready() for i in (0, 40)]
        names = reader.strings()
    assert cbids == [211, 307]
    assert "cudaGetDevice_v3020" not in names.values()


def test_calls_are_recorded_beside_one_that_cupti_names_and_the_driver_does_not_have() -> None:
    cuda = fake_cuda(newer_than_driver=1)
    with recording(["cuda_driver"]) as (session, reader):
        cuda.driver_launch()
        session.stop()
        records = reader.records()
    assert len(records[4]) == 1


def test_a_launch_and_its_kernel_share_the_correlation_id() -> None:
    cuda = fake_cuda()
    with recording(["cuda_runtime", "kernel"]) as (session, reader):
        cuda.launch()
        session.stop()
        records = reader.records()
    (call,), (kernel,) = records[5], records[10]
    assert call[32:36] == kernel[92:96]


def test_a_call_of_the_driver_inside_a_call_of_the_runtime_is_not_recorded() -> None:
    cuda = fake_cuda()
    with recording(["cuda_runtime", "cuda_driver", "kernel"]) as (session, reader):
        cuda.launch(count=2)
        cuda.driver_launch()
        session.stop()
        records = reader.records()
    assert {kind: len(found) for kind, found in records.items()} == {4: 1, 5: 2, 10: 3}
    assert records[4][0][32:36] == records[10][2][92:96]


def test_a_call_record_has_the_times_of_the_call() -> None:
    cuda = fake_cuda()
    before = time.time_ns()
    with recording(["cuda_runtime"]) as (session, reader):
        cuda.memset()
        session.stop()
        (record,) = reader.records()[5]
    start, end, process = struct.unpack_from("<QQI", record, 8)
    assert before <= start <= end <= time.time_ns()
    assert process == os.getpid()


def test_the_runtime_record_has_the_calling_threads_system_id() -> None:
    cuda = fake_cuda()
    with recording(["cuda_runtime"]) as (session, reader):
        cuda.memset()
        session.stop()
        thread = int.from_bytes(reader.ready()[0].data[28:32], "little")
    assert thread == threading.get_native_id()


def test_recycled_buffers_carry_any_number_of_records_through_a_small_arena() -> None:
    cuda = fake_cuda()
    with recording(["kernel"], limit_bytes=16 * MIB) as (session, reader):
        recycler = Recycler(reader)
        recycler.start()
        enough = 2 * 5000 * 216 // reader.fixed["buffer_bytes"]
        for _ in range(50):
            cuda.launch(count=5000)
            until(lambda: reader.states().count(arena.FREE) > enough, "there is room for two more such launches")
        outcome = session.stop()
        taken = recycler.end()
    assert outcome.counts.records == 250_000
    assert outcome.counts.dropped == 0
    assert outcome.counts.bytes == 250_000 * 216
    assert sorted(buffer.sequence for buffer in taken) == list(range(len(taken)))
    assert count_kinds(taken, {KERNEL: 216}) == {KERNEL: 250_000}


@pytest.mark.parametrize("version", [26, 27, 130001])
def test_at_the_limit_records_are_counted_as_dropped(version: int) -> None:
    cuda = fake_cuda(version=version)
    before = cuda.written(KERNEL) + cuda.dropped
    with recording(["kernel"], limit_bytes=1) as (session, reader):
        assert reader.fixed["buffer_count"] == 2
        cuda.launch(count=100_000)
        outcome = session.stop()
        kept = count_kinds(reader.ready(), reader.record_bytes())[KERNEL]
        assert reader.states() == [arena.READY] * 2  # a flush may have come before they were full
    assert cuda.written(KERNEL) + cuda.dropped - before == 100_000
    assert outcome.counts.records == kept
    assert 0 < kept < 41_000
    assert outcome.counts.dropped == 100_000 - kept


def test_cuptis_own_dropped_count_is_reported() -> None:
    cuda = fake_cuda(drop_next=7)
    with recording(["kernel"]) as (session, _):
        cuda.launch(count=10)
        outcome = session.stop()
    assert (outcome.counts.records, outcome.counts.dropped) == (3, 7)


def test_eight_threads_lose_nothing() -> None:
    cuda = fake_cuda()
    with recording(["kernel", "cuda_runtime"], limit_bytes=ENOUGH) as (session, reader):
        threads = [
            threading.Thread(target=cuda.launch, args=(f"kernel-{i}",), kwargs={"count": 10_000, "stream": i})
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        session.stop()
        counted = count_kinds(reader.ready(), reader.record_bytes())
        names = {text for (space, _), text in reader.strings().items() if space == SPACE_KERNEL_NAME}
    assert counted == {KERNEL: 80_000, RUNTIME: 80_000}
    assert names == {f"kernel-{i}" for i in range(8)}


def test_a_buffer_for_each_of_many_threads_is_there() -> None:
    """CUPTI lends one to each thread that launches, until it is full or flushed."""
    cuda = fake_cuda(per_thread=1)
    with recording(["kernel", "cuda_runtime"], limit_bytes=DEFAULT_LIMIT) as (session, _):
        threads = [threading.Thread(target=cuda.launch, kwargs={"count": 10, "stream": i % 64}) for i in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcome = session.stop()
    assert (outcome.counts.records, outcome.counts.dropped) == (4000, 0)


@pytest.mark.parametrize(
    ("limit_bytes", "launches"),
    [(16 * MIB, 300), (DEFAULT_LIMIT, 280_000 // 64)],
    ids=["little memory", "0.4 s of 700,000 launches a second"],
)
def test_nothing_is_dropped_while_the_daemon_does_not_read_for_a_while(limit_bytes: int, launches: int) -> None:
    cuda = fake_cuda()
    with recording(["kernel", "cuda_runtime"], limit_bytes=limit_bytes) as (session, _):
        cuda.storm(threads=64, launches=launches)
        outcome = session.stop()
    assert (outcome.counts.records, outcome.counts.dropped) == (2 * 64 * launches, 0)


def test_two_captures_in_a_row_give_the_same_counts() -> None:
    cuda = fake_cuda()
    finalized = cuda.finalized
    counts = []
    for _ in range(2):
        with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, reader):
            cuda.launch(count=50_000)
            with calling(cuda):
                outcome = session.stop()
            counts.append((outcome.counts.records, count_kinds(reader.ready(), reader.record_bytes())[KERNEL]))
    assert counts == [(50_000, 50_000), (50_000, 50_000)]
    assert cuda.finalized - finalized == 2


def test_a_periodic_flush_makes_records_ready_while_recording() -> None:
    cuda = fake_cuda()
    with recording(["kernel"]) as (session, reader):
        cuda.launch(count=5)
        wait_for_ready(reader, 1)
        until(lambda: session.counts().records == 5, "the others are ready, too")
        assert reader.word(arena.CLOCKS_LAST) > reader.word(arena.CLOCKS_FIRST) > 1_600_000_000_000_000_000
        assert reader.word(arena.CLOSED) == 0


def test_stop_closes_the_arena_and_leaves_no_buffer_between_states() -> None:
    cuda = fake_cuda()
    with recording() as (session, reader):
        cuda.launch(count=30_000)
        session.stop()
        assert reader.word(arena.CLOSED) == 1
        assert set(reader.states()) == {arena.FREE, arena.READY}


def test_records_of_one_kind_in_two_sizes_are_dropped_not_misread() -> None:
    cuda = fake_cuda()
    with recording(["kernel"]) as (session, reader):
        cuda.launch(count=20_000)
        wait_for_ready(reader, 1)
        cuda.set("one_wide_kernel", 1)
        cuda.launch(count=100)
        outcome = session.stop()
        kept = count_kinds(reader.ready(), reader.record_bytes())[KERNEL]
    assert outcome.counts.records == kept
    assert outcome.counts.dropped == 20_100 - kept
    assert "in several sizes" in own_warnings(outcome.warnings)[0]


def test_a_longer_record_than_the_tables_is_observed_as_it_is() -> None:
    cuda = fake_cuda(extra_kernel_bytes=16)
    with recording(["kernel"]) as (session, reader):
        cuda.launch(count=3)
        session.stop()
        assert reader.record_bytes() == {KERNEL: 232}


def test_records_in_a_buffer_that_cupti_kept_from_an_earlier_session_are_not_lost() -> None:
    cuda = fake_cuda(hold_a_buffer=1)
    with recording(["kernel"]) as (session, reader):
        cuda.launch()
        session.stop()
        assert reader.word(arena.CLOSED) == 1
        assert arena.LOANED in reader.states()
    cuda.set("hold_a_buffer", 0)
    with recording(["kernel"]) as (session, reader):
        cuda.launch(count=3)  # into the buffer that it has kept
        assert session.stop().counts.records == 4
        assert count_kinds(reader.ready(), reader.record_bytes()) == {KERNEL: 4}


def test_the_arena_is_sealed_and_private_to_the_daemon() -> None:
    fake_cuda()
    session = source().prepare(request())
    seals = fcntl.fcntl(session.arena_fd, 1034)  # F_GET_SEALS
    with mmap.mmap(session.arena_fd, 4096) as mapped:
        assert mapped[:8] == b"KINETOA1"
    session.close()
    assert seals & 0x7 == 0x7  # no shrinking, no growing, no more sealing
    assert not fcntl_open(session.arena_fd)


def fcntl_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def test_a_prepared_session_may_be_closed_without_a_start() -> None:
    cuda = fake_cuda()
    source().prepare(request()).close()
    with recording(["kernel"]) as (session, _):
        cuda.launch()
        assert session.stop().counts.records == 1


def test_the_collectors_thread_exists_between_start_and_stop_only() -> None:
    def exists() -> bool:
        return "kineto-collect" in thread_names(1000).values()

    fake_cuda()
    until(lambda: not exists(), "that of an earlier test has gone")
    with recording() as (session, _):
        until(exists, "it has its name")
        session.stop()
        until(lambda: not exists(), "it has gone")  # for the kernel, too


def test_the_cpu_time_of_the_thread_is_reported() -> None:
    cuda = fake_cuda()
    with recording() as (session, _):
        cuda.launch(count=10_000)
        outcome = session.stop()
    assert 0 < outcome.cpu_ns < 1_000_000_000
    assert outcome.metadata["cupti_enable_ns"] > 0
