"""The service of kinetod-counters in this process, with a backend that does what a test says."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kinetod.counters import messages
from kinetod.counters.counter_client import CounterClient, CounterSession
from kinetod.counters.interface import CounterCode, CounterError, WantedCounters
from kinetod.counters.sampler_server import UNKNOWN, SamplerService, holder
from support.accelerators.drm_host import DrmHost
from support.counters.in_process import InProcess
from support.counters.memory_backend import MemoryBackend
from support.waiting import scaled, soon

OVERVIEW = WantedCounters(set_name="overview")
MS = 1_000_000


@asynccontextmanager
async def serving(
    backend: MemoryBackend,
    *,
    holder_of: Callable[[str], str] = lambda _: "Nsight Compute (process 7)",
    may_ask: Callable[[int], bool] = lambda _: True,
) -> AsyncIterator[tuple[CounterClient, InProcess]]:
    service = SamplerService(backend, may_ask=may_ask, holder_of=holder_of)
    connections = InProcess(service)
    client = CounterClient(connections, answer_s=scaled(30))
    try:
        yield client, connections
    finally:
        await client.stop()


async def refused(client: CounterClient, uuid: str = "GPU-0") -> CounterError:
    with pytest.raises(CounterError) as told:
        await client.start(uuid, OVERVIEW, MS)
    return told.value


async def ended(session: CounterSession) -> str:
    await session.stop()
    reason = session.verdict().reason
    session.close()
    return reason


def test_rows_of_a_sampling_can_be_taken_after_it_was_stopped() -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, _):
            session = await client.start("GPU-1", OVERVIEW, MS)
            assert (session.gpu.uuid, session.backend, session.plan.metrics[0].unit) == ("GPU-1", "memory", "%")
            await session.stop()
            (row,) = session.take()
            assert (row["start_ns"], row["end_ns"], row["values"].tolist()) == (1000, 2000, [7.0])
            verdict = session.verdict()
            assert (verdict.code, verdict.reason, verdict.rows) == ("", "", 1)
            session.close()

    asyncio.run(ask())


def test_a_gpu_has_one_sampling_at_a_time_and_another_one_its_own() -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, connections):
            first = await client.start("GPU-0", OVERVIEW, MS)
            error = await refused(client)
            assert error.code is CounterCode.BUSY
            assert "kinetod is sampling its counters for another request" in error.reason
            other = await client.start("GPU-1", OVERVIEW, MS)
            assert [await ended(first), await ended(other)] == ["", ""]
            await soon(lambda: not connections.service.held, "the GPUs are free")
            assert await ended(await client.start("GPU-0", OVERVIEW, MS)) == ""

    asyncio.run(ask())


def test_a_caller_that_dies_frees_its_gpu() -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, connections):
            session = await client.start("GPU-0", OVERVIEW, MS)
            session._connection.close()
            await soon(lambda: not connections.service.held, "the GPU is free")
            session.close()
            assert await ended(await client.start("GPU-0", OVERVIEW, MS)) == ""

    asyncio.run(ask())


def test_who_holds_the_counters_is_named() -> None:
    async def ask() -> None:
        backend = MemoryBackend()
        backend.error = CounterError(CounterCode.BUSY, "another process is using its counters")
        async with serving(backend) as (client, _):
            error = await refused(client)
            assert error.code is CounterCode.BUSY
            assert error.reason.startswith("GPU GPU-0: Nsight Compute (process 7) is using its counters")

    asyncio.run(ask())


def test_a_driver_that_hangs_is_refused_in_time_and_nothing_new_is_begun_until_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kinetod.counters.sampler_server.STOP_S", 0.05)

    async def ask() -> None:
        backend = MemoryBackend()
        async with serving(backend) as (client, connections):
            served = await client.start("GPU-1", OVERVIEW, MS)
            backend.hang = threading.Event()
            connections.service.work_s = 0.05
            assert "the driver did not answer within" in (await refused(client)).reason
            assert connections.service.hung
            assert "the driver is not responding" in (await refused(client)).reason
            monkeypatch.setattr("kinetod.counters.sampler_server.STOP_S", scaled(20))
            assert await ended(served) == ""  # those who are being served go on
            backend.hang.set()
            await soon(lambda: not connections.service.hung, "the driver has returned")
            assert not connections.service.held

    asyncio.run(ask())


def test_a_sampling_that_does_not_end_is_told_and_counts_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinetod.counters.sampler_server.STOP_S", 0.05)

    async def ask() -> None:
        backend = MemoryBackend()
        backend.ends = threading.Event()
        async with serving(backend) as (client, connections):
            reason = await ended(await client.start("GPU-0", OVERVIEW, MS))
            assert "kinetod-counters has ended or is not responding" in reason
            assert connections.service.hung
            backend.ends.set()
            await soon(lambda: not connections.service.hung, "it has ended")

    asyncio.run(ask())


def test_a_user_who_is_not_named_is_refused() -> None:
    async def ask() -> None:
        async with serving(MemoryBackend(), may_ask=lambda uid: uid != os.geteuid()) as (client, _):
            with pytest.raises(CounterError, match=r"uid \d+ is not allowed to use kinetod-counters") as told:
                await client.gpus()
            assert told.value.code is CounterCode.NOT_PERMITTED

    asyncio.run(ask())


def test_lists_are_as_long_as_a_packet() -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, _):
            names = await client.base_metrics("GPU-0")
            assert 1000 < len(names) < 4000
            assert [gpu.uuid for gpu in (await client.gpus()).gpus] == ["GPU-0", "GPU-1"]
            assert (await client.plan("GPU-0", OVERVIEW)).metrics[0].name == "metric"

    asyncio.run(ask())


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"KCTR\x01\x00{}",
        b'KCTR\x01\x00{"type":"list_gpus","more":1}',
        b'KCTR\x09\x00{"type":"list_gpus"}',
        b"KCTR\x01\x00" + b"[" * 5000,
        b'KCTR\x01\x00{"type":"start","gpu":"GPU-0","interval_ns":-1,"most_ns":1}',
        b'KCTR\x01\x00{"type":"plan","gpu":"GPU-0","metrics":["' + b"m" * 200 + b'"]}',
        b"y" * (messages.MAX_REQUEST_BYTES + 1),
    ],
)
def test_a_packet_that_is_no_request_ends_its_connection_only(packet: bytes) -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, connections):
            sock = await connections.connect()
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, packet)
            said = messages.answer(await loop.sock_recv(sock, 1 << 16))
            assert isinstance(said, messages.CountersRefused) and said.code == "REQUEST"
            assert await loop.sock_recv(sock, 1) == b""
            sock.close()
            assert len((await client.gpus()).gpus) == 2

    asyncio.run(ask())


@pytest.mark.parametrize("uuid", ["../../etc/passwd", "", "GPU-" + "0" * 100])
def test_a_name_that_could_be_no_gpus_is_not_asked_about(uuid: str) -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, connections):
            assert (await refused(client, uuid)).code is CounterCode.UNAVAILABLE
            assert connections.made == []

    asyncio.run(ask())


@pytest.mark.parametrize("interval_ns", [-1, 1, 9_999, 1_000_000_001])
def test_an_interval_out_of_bounds_is_refused(interval_ns: int) -> None:
    async def ask() -> None:
        async with serving(MemoryBackend()) as (client, _):
            with pytest.raises(CounterError, match="must be between 10us and 1s"):
                await client.start("GPU-0", OVERVIEW, interval_ns)

    asyncio.run(ask())


BUS = "0000:1B:00.0"


def process(proc: Path, pid: int, name: str, gpus: tuple[int, ...], library: str = "") -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "cmdline").write_bytes(f"/usr/bin/{name}\0".encode())
    line = f"7f0000000000-7f0000001000 r-xp 00000000 08:01 77    /usr/lib/{library}\n" if library else ""
    (folder / "maps").write_text(line)
    for number, gpu in enumerate(gpus):
        (folder / "fd" / str(number)).symlink_to(f"/dev/nvidia{gpu}")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    gpu = tmp_path / "driver/nvidia/gpus/0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t Fake\nDevice Minor: \t 3\n")
    process(tmp_path, 50, "python3", (3,))
    return tmp_path


def test_a_host_without_a_sign_of_a_profiler_has_no_name_to_tell(proc: Path) -> None:
    assert holder(BUS, proc) == UNKNOWN


def test_a_profiler_that_has_the_gpu_open_is_named(proc: Path) -> None:
    process(proc, 60, "ncu", (3,))
    assert holder(BUS, proc) == "Nsight Compute (process 60)"


def test_one_that_has_another_gpu_open_is_not(proc: Path) -> None:
    process(proc, 60, "ncu", (1,))
    process(proc, 61, "nv-hostengine", (3,), "libdcgmmoduleprofiling.so.4")
    assert holder(BUS, proc) == "DCGM (process 61)"


def test_one_that_only_may_hold_counters_is_named_last(proc: Path) -> None:
    process(proc, 60, "nsys", (3,))
    assert holder(BUS, proc) == "Nsight Systems (process 60)"
    process(proc, 61, "train", (3,), "libnvperf_host.so")
    assert holder(BUS, proc) == "CUPTI's hardware counters (process 61)"


def test_a_tool_is_named_rather_than_the_program_that_it_measures(proc: Path) -> None:
    process(proc, 60, "ncu", ())
    process(proc, 61, "train", (3,), "libnvperf_host.so")
    assert holder(BUS, proc) == "Nsight Compute (process 60)"


def test_our_own_process_is_not_the_holder(proc: Path) -> None:
    process(proc, os.getpid(), "kinetod-counters", (3,), "libnvperf_host.so")
    assert holder(BUS, proc) == UNKNOWN


def test_nobody_is_suspected_of_the_counters_of_another_vendors_gpu(proc: Path, tmp_path: Path) -> None:
    host = DrmHost(tmp_path / "host")
    host.gpu("amdgpu", "0000:c1:00.0", 128)
    process(proc, 60, "ncu", ())
    assert holder("0000:c1:00.0", proc, host.sys) == UNKNOWN
    assert holder(BUS, proc, host.sys) == "Nsight Compute (process 60)"
