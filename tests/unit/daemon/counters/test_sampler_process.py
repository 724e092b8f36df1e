"""kinetod-counters as the daemon's child: killed, left alone, held off by another one."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kineto_trace.spool.counter_samples import read_counter_samples
from kinetod.counters.counter_client import CounterClient, CountersChild, CountersService
from kinetod.counters.counter_recording import RecordedGpu, record_counters
from kinetod.counters.interface import CounterCode, CounterError, WantedCounters
from support.counters.fake_pm_sampling import UUID, FakePmSampling
from support.waiting import scaled, soon

OVERVIEW = WantedCounters(set_name="overview")
MS = 1_000_000
GPUS = [UUID.format(0), UUID.format(1)]


def with_client(fake: FakePmSampling, body: Callable[[CounterClient], Awaitable[None]]) -> None:
    async def ask() -> None:
        client = CounterClient(fake.child(), answer_s=scaled(30))
        try:
            await body(client)
        finally:
            await client.stop()

    asyncio.run(ask())


def into(folder: Path, uuids: list[str]) -> dict[str, list[Path]]:
    return {uuid: [folder] for uuid in uuids}


def rows(result: RecordedGpu) -> int:
    (path,) = result.files
    return len(read_counter_samples(path).start_ns)


async def until_rows(folder: Path, files: int = 2) -> None:
    def grown() -> bool:
        found = list(folder.glob("*.counters"))
        return len(found) == files and all(path.stat().st_size > 20_000 for path in found)

    await soon(grown, "the files have rows")


def test_two_gpus_are_recorded_at_once_and_a_third_that_is_not_there_is_refused(
    fake: FakePmSampling, tmp_path: Path
) -> None:
    async def body(client: CounterClient) -> None:
        recording = await record_counters(client, into(tmp_path, [*GPUS, "GPU-none"]), OVERVIEW, MS)
        assert recording.gpus == tuple(GPUS)
        await until_rows(tmp_path)
        results = {each.gpu_uuid: each for each in await recording.stop()}
        recording.close()
        assert results["GPU-none"].losses.code is CounterCode.UNAVAILABLE and results["GPU-none"].files == ()
        for index, uuid in enumerate(GPUS):
            result = results[uuid]
            (path,) = result.files
            found = read_counter_samples(path)
            assert (found.header.gpu_uuid, found.header.gpu_index, found.header.chip) == (uuid, index, "GH100")
            assert (found.header.set, found.header.backend, found.header.interval_ns) == ("overview", "cupti", MS)
            assert len(found.start_ns) == result.losses.rows > 300
            assert result.losses.dropped_rows == found.disordered == 0
            assert (found.values[:, 1] - found.values[:, 0] == 100).all()
            assert (found.values[:, 0] // 1000 == index).all()
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0

    with_client(fake, body)
    assert fake.wrong() == []


def test_a_killed_process_leaves_its_rows_and_the_next_one_samples_at_once(
    fake: FakePmSampling, tmp_path: Path
) -> None:
    fake.play(f"busy={tmp_path / 'held'}")

    async def body(client: CounterClient) -> None:
        before, after = tmp_path / "before", tmp_path / "after"
        before.mkdir()
        after.mkdir()
        recording = await record_counters(client, into(before, GPUS), OVERVIEW, MS)
        await until_rows(before)
        (pid,) = client.pids()
        os.kill(pid, signal.SIGKILL)
        for result in await recording.stop():
            assert result.losses.code is CounterCode.FAILED
            assert "kinetod-counters has ended" in result.losses.reason
            assert rows(result) == result.losses.rows > 300
        recording.close()
        again = await record_counters(client, into(after, GPUS), OVERVIEW, MS)
        await until_rows(after)
        assert [each.losses.code for each in await again.stop()] == ["", ""]
        again.close()

    with_client(fake, body)


def test_who_comes_second_on_a_host_is_refused_and_does_not_disturb_the_first(
    fake: FakePmSampling, tmp_path: Path
) -> None:
    fake.play(f"busy={tmp_path / 'held'}")

    async def body(client: CounterClient) -> None:
        recording = await record_counters(client, into(tmp_path, GPUS[:1]), OVERVIEW, MS)
        second = CounterClient(fake.child(), answer_s=scaled(30))
        with pytest.raises(CounterError, match="is using its counters, which only one process can use") as told:
            await second.start(GPUS[0], OVERVIEW, MS)
        assert told.value.code is CounterCode.BUSY
        await second.stop()
        await until_rows(tmp_path, 1)
        (result,) = await recording.stop()
        recording.close()
        assert result.losses.code == ""

    with_client(fake, body)
    assert fake.wrong() == []


def test_eight_gpus_have_a_thread_each(fake: FakePmSampling, tmp_path: Path) -> None:
    fake.play("gpus=8")
    uuids = [UUID.format(index) for index in range(8)]

    async def body(client: CounterClient) -> None:
        recording = await record_counters(client, into(tmp_path, uuids), OVERVIEW, 2 * MS)
        await until_rows(tmp_path, 8)
        results: list[RecordedGpu] = await recording.stop()
        recording.close()
        assert [(each.gpu_uuid, each.losses.code) for each in results] == [(uuid, "") for uuid in uuids]

    with_client(fake, body)
    assert fake.wrong() == []


def test_a_file_of_its_largest_size_ends_the_sampling_with_the_reason(fake: FakePmSampling, tmp_path: Path) -> None:
    async def body(client: CounterClient) -> None:
        recording = await record_counters(client, into(tmp_path, GPUS[:1]), OVERVIEW, MS, max_bytes=4800)
        await soon(lambda: recording._recorded[0].problem, "the file is full")
        (result,) = await recording.stop()
        recording.close()
        assert (result.losses.code, result.losses.reason) == (
            CounterCode.FAILED,
            "sampling ended early: the file has reached its maximum size",
        )
        assert rows(result) <= 100

    with_client(fake, body)


def test_a_file_that_is_there_is_not_replaced(fake: FakePmSampling, tmp_path: Path) -> None:
    (tmp_path / f"{GPUS[0]}.counters").write_bytes(b"mine")

    async def body(client: CounterClient) -> None:
        recording = await record_counters(client, into(tmp_path, GPUS[:1]), OVERVIEW, MS)
        (result,) = await recording.stop()
        assert (result.files, result.losses.code) == ((), CounterCode.FAILED)
        assert (tmp_path / f"{GPUS[0]}.counters").read_bytes() == b"mine"

    with_client(fake, body)


def test_the_child_ends_with_the_daemon(fake: FakePmSampling) -> None:
    async def body(client: CounterClient) -> None:
        await client.gpus()
        (pid,) = client.pids()
        await client.stop()
        await soon(lambda: not Path(f"/proc/{pid}").exists(), "it has ended")
        assert len((await client.gpus()).gpus) == 2  # and another one is started when it is needed

    with_client(fake, body)


def test_a_child_that_nobody_asks_ends_and_the_next_caller_starts_it_again(fake: FakePmSampling) -> None:
    async def ask() -> None:
        child = CountersChild(("--library", str(fake.library), "--idle-exit", "50ms"))
        client = CounterClient(child, answer_s=scaled(30))
        assert len((await client.gpus()).gpus) == 2
        await soon(lambda: not client.pids(), "it has ended")
        assert len((await client.gpus()).gpus) == 2
        await client.stop()

    asyncio.run(ask())


def test_a_program_that_does_not_serve_is_told(tmp_path: Path) -> None:
    async def ask() -> None:
        client = CounterClient(CountersChild(command=(sys.executable, "-S", "-c", "")))
        with pytest.raises(CounterError, match=r"kinetod-counters (has ended|exits as soon as it is started)"):
            await client.gpus()
        await client.stop()
        with pytest.raises(CounterError, match=r"is kinetod-counters\.socket enabled\?"):
            await CounterClient(CountersService(tmp_path / "none")).gpus()

    asyncio.run(ask())


def test_the_service_listens_on_its_socket(fake: FakePmSampling, tmp_path: Path) -> None:
    path = tmp_path / "counters.sock"

    async def ask() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "kinetod.counters", "--socket", str(path), "--library", str(fake.library),
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await soon(path.is_socket, "it listens")
            client = CounterClient(CountersService(path), answer_s=scaled(30))
            session = await client.start(GPUS[0], OVERVIEW, MS)
            await session.stop()
            assert session.verdict().code == ""
            session.close()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(ask())
