"""The real kinetod-counters on a host with AMD's GPUs, and with those of two vendors."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kineto_trace.spool.counter_samples import read_counter_samples
from kinetod.counters.counter_client import CounterClient, CountersChild, CounterSession
from kinetod.counters.counter_recording import record_counters
from kinetod.counters.interface import CounterCode, CounterError, WantedCounters
from support.counters.fake_pm_sampling import PATIENT_COMMAND, UUID, FakePmSampling, environment
from support.counters.gpu_metrics_tables import PlayedAmdgpu
from support.waiting import scaled, soon

OVERVIEW = WantedCounters(set_name="overview")
NVIDIA = UUID.format(0)


def with_client(played: PlayedAmdgpu, child: CountersChild, body: Callable[[CounterClient], Awaitable[None]]) -> None:
    async def ask() -> None:
        client = CounterClient(child, answer_s=scaled(30))
        try:
            await body(client)
        finally:
            await client.stop()

    with environment(played.environ()), played.alive():
        asyncio.run(ask())


def amd_only() -> CountersChild:
    return CountersChild(("--backend", "amdgpu"), command=PATIENT_COMMAND)


def written(session: CounterSession) -> int:
    return session.status().written


async def until_rows(folder: Path, files: int, size: int) -> None:
    def grown() -> bool:
        found = list(folder.glob("*.counters"))
        return len(found) == files and all(path.stat().st_size > size for path in found)

    await soon(grown, "the files have rows")


def test_gpus_of_two_vendors_are_recorded_at_once_each_at_its_own_interval(
    fake: FakePmSampling, tmp_path: Path
) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 8), (1, 5))
    (tmp_path / "to").mkdir()

    async def body(client: CounterClient) -> None:
        listed = await client.gpus()
        assert (listed.backend, listed.library_version.split(", ")[0]) == ("cupti, amdgpu", "130001")
        assert [gpu.uuid for gpu in listed.gpus] == [NVIDIA, UUID.format(1), *played.uuids]
        folders = {uuid: [tmp_path / "to"] for uuid in (NVIDIA, *played.uuids)}
        recording = await record_counters(client, folders, OVERVIEW, 0)
        assert recording.refused == ()
        await until_rows(tmp_path / "to", 3, 1500)
        results = {each.gpu_uuid: each for each in await recording.stop()}
        recording.close()
        for uuid, backend, interval_ns in (
            (NVIDIA, "cupti", 1_000_000),
            *((uuid, "amdgpu", 10_000_000) for uuid in played.uuids),
        ):
            (path,) = results[uuid].files
            assert (results[uuid].losses.code, results[uuid].interval_ns) == ("", interval_ns)
            found = read_counter_samples(path)
            assert (found.header.backend, found.header.interval_ns) == (backend, interval_ns)
            assert found.disordered == 0 and len(found.start_ns) == results[uuid].losses.rows
        first = read_counter_samples(results[played.uuids[0]].files[0])
        labels = [metric.label for metric in first.header.metrics]
        assert labels[:3] == ["GPU busy", "DRAM", "Power, mean"]
        assert set(first.values[:, 0]) == {10.0}
        assert np.nanmean(first.values[:, 2]) == pytest.approx(100.0, rel=0.02)
        assert first.header.chip == "gfx942"

    with_client(played, fake.child(), body)
    assert fake.wrong() == []


def test_a_vendor_whose_library_is_missing_leaves_the_other_one_at_work(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 8))

    async def body(client: CounterClient) -> None:
        listed = await client.gpus()
        assert [gpu.uuid for gpu in listed.gpus] == played.uuids
        session = await client.start(played.uuids[0], OVERVIEW, 0)
        assert (session.backend, session.interval_ns) == ("amdgpu", 10_000_000)
        await session.stop()
        session.close()

    with_client(played, CountersChild(("--library", str(tmp_path / "libcupti.so")), command=PATIENT_COMMAND), body)


def test_a_killed_process_leaves_its_rows_and_the_next_one_samples_at_once(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 8))
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()

    async def body(client: CounterClient) -> None:
        recording = await record_counters(client, {played.uuids[0]: [before]}, OVERVIEW, 0)
        await until_rows(before, 1, 1500)
        (pid,) = client.pids()
        os.kill(pid, signal.SIGKILL)
        (result,) = await recording.stop()
        recording.close()
        assert result.losses.code is CounterCode.FAILED and "kinetod-counters has ended" in result.losses.reason
        assert len(read_counter_samples(result.files[0]).start_ns) == result.losses.rows > 0
        again = await record_counters(client, {played.uuids[0]: [after]}, OVERVIEW, 0)
        await until_rows(after, 1, 1500)
        assert [each.losses.code for each in await again.stop()] == [""]
        again.close()

    with_client(played, amd_only(), body)


def test_a_gpu_without_a_serial_number_is_known_by_its_pci_address(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 3))
    (played.folders[0] / "unique_id").unlink()

    async def body(client: CounterClient) -> None:
        (gpu,) = (await client.gpus()).gpus
        recording = await record_counters(client, {gpu.uuid: [tmp_path]}, OVERVIEW, 0)
        await until_rows(tmp_path, 1, 1500)
        (result,) = await recording.stop()
        recording.close()
        assert (result.gpu_uuid, result.losses.code) == ("0000:c0:00.0", "")
        assert result.files[0].name == "0000:c0:00.0.counters"

    with_client(played, amd_only(), body)


def test_two_processes_have_the_same_gpu_at_once(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 8))

    async def body(client: CounterClient) -> None:
        first = await client.start(played.uuids[0], OVERVIEW, 0)
        other = CounterClient(amd_only(), answer_s=scaled(30))
        second = await other.start(played.uuids[0], OVERVIEW, 0)
        for session in (first, second):
            await soon(partial(written, session), "there are samples")
            await session.stop()
            assert session.verdict().code == ""
            session.close()
        await other.stop()

    with_client(played, amd_only(), body)


def test_an_interval_that_the_firmware_cannot_give_is_refused_with_the_reason(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path / "host", (1, 8))

    async def body(client: CounterClient) -> None:
        with pytest.raises(CounterError, match="use at least 10 ms") as told:
            await client.start(played.uuids[0], OVERVIEW, 100_000)
        assert told.value.code is CounterCode.INVALID_METRIC

    with_client(played, amd_only(), body)
