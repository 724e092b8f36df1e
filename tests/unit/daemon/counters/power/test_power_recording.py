"""Power and clocks of GPUs beside a capture: the real process, the fake NVML, and all that may go wrong with them."""

import asyncio
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace.spool.counter_samples import CounterSamples, read_counter_samples
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power import power_recording
from kinetod.counters.power.interface import PowerNews, PowerRequest
from kinetod.counters.power.power_recording import PowerRecording, RecordedPower, record_power
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, GpuState, Snapshot
from support.machine.gpus import FakeGpus
from support.waiting import scaled, soon

GPUS = [f"GPU-00000000-0000-0000-0000-{number:012}" for number in range(2)]
MS = 1_000_000
PATIENT = """
from kinetod.counters.power import power_process
power_process.MOST_ROW_NS = 10**15
power_process.main()
"""  # to which no reading is late
LABELS = {
    "Power": "W",
    "Power, mean": "W",
    "Power limit": "W",
    "SM clock": "Hz",
    "SM clock maximum": "Hz",
    "Memory clock": "Hz",
    "Temperature": "°C",
    "Throttled by power": "",
    "Throttled by heat": "",
    "Throttled by hardware": "",
}


def recorded(
    reader: GpuReader,
    folder: Path,
    body: Callable[[PowerRecording], Awaitable[None]],
    gpus: Sequence[str] = GPUS,
    *,
    within_s: float = 20.0,
    **options: object,
) -> dict[str, RecordedPower]:
    """What became of each GPU's file in this folder when that was done."""

    async def record() -> dict[str, RecordedPower]:
        folders = {uuid: [folder] for uuid in gpus}
        usual = {"period_ns": 10 * MS, "command": [sys.executable, "-P", "-c", PATIENT]}
        recording = await record_power(reader, folders, **{**usual, **options})  # type: ignore[arg-type]
        try:
            await body(recording)
            return {each.gpu_uuid: each for each in await recording.leave(folder, time.time_ns(), within_s)}
        finally:
            await recording.stop()

    return asyncio.run(record())


def read(result: RecordedPower) -> CounterSamples:
    assert result.path is not None
    found = read_counter_samples(result.path)
    assert len(found.start_ns) >= result.losses.rows and found.disordered == 0
    return found


def values(samples: CounterSamples, label: str) -> npt.NDArray[np.float32]:
    (column,) = (place for place, metric in enumerate(samples.header.metrics) if metric.label == label)
    return samples.values[:, column]


def rows_in(folder: Path, gpu: str) -> int:
    path = folder / f"{gpu}.power.counters"
    return len(read_counter_samples(path).start_ns) if path.stat().st_size else 0


async def until_more_rows(folder: Path, gpus: Sequence[str] = GPUS, more: int = 3) -> None:
    before = {gpu: rows_in(folder, gpu) for gpu in gpus}
    await soon(lambda: all(rows_in(folder, gpu) >= before[gpu] + more for gpu in gpus), "there are more rows")


async def nothing(recording: PowerRecording) -> None:
    pass


def test_two_gpus_are_read_at_once_and_a_third_that_is_not_there_is_refused(reader: GpuReader, tmp_path: Path) -> None:
    async def body(recording: PowerRecording) -> None:
        await soon(lambda: recording.refused, "the third GPU is refused")
        assert recording.gpus == tuple(GPUS)
        await until_more_rows(tmp_path)

    results = recorded(reader, tmp_path, body, [*GPUS, "GPU-none"])
    assert results["GPU-none"].path is None and not (tmp_path / "GPU-none.power.counters").exists()
    assert results["GPU-none"].losses.code == CounterCode.UNAVAILABLE
    assert results["GPU-none"].losses.reason == "GPU GPU-none: NVML: Not Found"
    for index, uuid in enumerate(GPUS):
        result, samples = results[uuid], read(results[uuid])
        head = samples.header
        assert (result.losses.code, stat.S_IMODE((tmp_path / f"{uuid}.power.counters").stat().st_mode)) == ("", 0o600)
        assert (head.gpu_uuid, head.gpu_index, head.chip, head.set) == (uuid, index, "NVIDIA H200", "power")
        assert (head.backend, head.library_version, head.interval_ns) == ("nvml", "580.65.06", 10 * MS)
        assert {metric.label: metric.unit for metric in head.metrics} == LABELS
        assert len({metric.name for metric in head.metrics}) == len(head.metrics)
        expected = [498 + index / 1000, 0, 700, 1.98e9, 2.04e9, 3.201e9, 61, 0, 0, 0]
        assert samples.values[-1].tolist() == pytest.approx(expected)


def test_the_mean_power_adds_up_to_the_energy_that_was_used(gpus: FakeGpus, reader: GpuReader, tmp_path: Path) -> None:
    async def body(_recording: PowerRecording) -> None:
        for used in (1000, 2500, 2500, 7000):
            await until_more_rows(tmp_path, GPUS[:1])
            gpus.say(f"energy {123456000 + used}")
        await until_more_rows(tmp_path, GPUS[:1])

    samples = read(recorded(reader, tmp_path, body, GPUS[:1])[GPUS[0]])
    seconds = (samples.end_ns - samples.start_ns) / 1e9
    assert (values(samples, "Power, mean") * seconds).sum() == pytest.approx(7.0, rel=1e-4)


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [(0x3, []), (0x4, ["power"]), (0x20, ["heat"]), (0x48, ["heat", "hardware"]), (0x80, ["power", "hardware"])],
)
def test_the_reasons_for_lower_clocks_are_told_apart(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path, reasons: int, throttled: list[str]
) -> None:
    gpus.say(f"reasons {reasons}")

    async def body(_recording: PowerRecording) -> None:
        await until_more_rows(tmp_path, GPUS[:1], 1)

    samples = read(recorded(reader, tmp_path, body, GPUS[:1])[GPUS[0]])
    kinds = ("power", "heat", "hardware")
    assert [kind for kind in kinds if values(samples, f"Throttled by {kind}").all()] == throttled
    assert [kind for kind in kinds if values(samples, f"Throttled by {kind}").any()] == throttled


def test_an_old_driver_tells_the_power_of_the_last_second_and_no_energy(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path
) -> None:
    gpus.say("old 1", "reasons 4")

    async def body(_recording: PowerRecording) -> None:
        await until_more_rows(tmp_path, GPUS[:1], 1)

    samples = read(recorded(reader, tmp_path, body, GPUS[:1])[GPUS[0]])
    assert samples.header.metrics[0].name == "nvmlDeviceGetPowerUsage"
    assert {metric.label for metric in samples.header.metrics} == set(LABELS) - {"Power, mean"}
    assert values(samples, "Power")[-1] == pytest.approx(512.345)
    assert values(samples, "Throttled by power").all()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("no_power 1", "reports neither power nor clocks nor temperature"),
        ("init 9", "Driver Not Loaded"),
        ("lost 0", "GPU is lost"),
    ],
)
def test_a_gpu_that_tells_nothing_is_refused_with_the_reason(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path, said: str, reason: str
) -> None:
    gpus.say(said, "old 1")

    async def body(recording: PowerRecording) -> None:
        await soon(lambda: recording.refused, "it is refused")
        assert recording.gpus == ()

    losses = recorded(reader, tmp_path, body, GPUS[:1])[GPUS[0]].losses
    assert losses.code in (CounterCode.UNAVAILABLE, CounterCode.FAILED) and reason in losses.reason
    assert list(tmp_path.glob("*.counters")) == []


def test_a_gpu_that_falls_off_the_bus_keeps_its_rows_and_the_other_goes_on(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path
) -> None:
    async def body(recording: PowerRecording) -> None:
        await until_more_rows(tmp_path)
        gpus.say("lost 0")
        await soon(lambda: recording._news[GPUS[0]].code, "it is told")
        assert recording.gpus == tuple(GPUS) and recording.refused == ()
        await until_more_rows(tmp_path, GPUS[1:])

    results = recorded(reader, tmp_path, body)
    lost, other = (results[uuid] for uuid in GPUS)
    assert (lost.losses.code, lost.losses.reason) == (CounterCode.FAILED, f"GPU {GPUS[0]}: NVML: GPU is lost")
    assert len(read(lost).start_ns) >= 3
    assert other.losses.code == "" and len(read(other).start_ns) > len(read(lost).start_ns)


def test_a_driver_that_hangs_for_one_gpu_is_named_and_the_other_goes_on(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path
) -> None:
    async def body(_recording: PowerRecording) -> None:
        await until_more_rows(tmp_path)
        gpus.say("hang_reasons 0")
        await until_more_rows(tmp_path, GPUS[1:], 10)

    results = recorded(reader, tmp_path, body, within_s=scaled(1))
    assert results[GPUS[0]].losses.code == CounterCode.FAILED
    assert results[GPUS[0]].losses.reason == "the driver did not answer in time; readings are missing"
    assert len(read(results[GPUS[0]]).start_ns) >= 3
    assert results[GPUS[1]].losses.code == ""


def test_a_driver_that_does_not_come_up_holds_up_nobody(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power_recording, "START_S", 0.1)
    gpus.say("hang_init 1")
    results = recorded(reader, tmp_path, nothing, within_s=0.1)
    assert [result.path for result in results.values()] == [None, None]
    assert all(result.losses.reason.startswith("the driver did not answer") for result in results.values())
    assert list(tmp_path.glob("*.counters")) == []


def test_a_reading_that_was_late_leaves_a_gap_that_is_counted(
    gpus: FakeGpus, reader: GpuReader, tmp_path: Path
) -> None:
    async def body(_recording: PowerRecording) -> None:
        await until_more_rows(tmp_path)
        gpus.say("hang_reasons 0")
        silent = time.monotonic()
        await soon(lambda: time.monotonic() > silent + 1.2, "it is longer than a row may be")
        gpus.say()
        await until_more_rows(tmp_path)

    losses = recorded(reader, tmp_path, body, command=power_recording.COMMAND)[GPUS[0]].losses
    assert (losses.code, losses.gaps >= 1, losses.lost_ns > 100 * MS) == ("", True, True)
    assert " of readings are missing, in 1 place" in losses.reason


def test_a_killed_process_leaves_its_rows(reader: GpuReader, tmp_path: Path) -> None:
    async def body(recording: PowerRecording) -> None:
        await until_more_rows(tmp_path)
        assert recording._process is not None
        recording._process.kill()

    for result in recorded(reader, tmp_path, body).values():
        assert result.losses.code == CounterCode.FAILED
        assert result.losses.reason == "the process that reads power failed (exit status -9); see the daemon's log"
        assert len(read(result).start_ns) >= 3


def test_a_process_that_does_not_end_is_killed(
    reader: GpuReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power_recording, "STOP_S", 0.1)
    pids: list[int] = []

    async def body(recording: PowerRecording) -> None:
        await until_more_rows(tmp_path)
        assert recording._process is not None
        pids.append(recording._process.pid)
        os.kill(pids[0], signal.SIGSTOP)
        late_s = asyncio.get_running_loop().time() + 0.2
        await soon(lambda: asyncio.get_running_loop().time() > late_s, "rows are missing")

    for result in recorded(reader, tmp_path, body, within_s=0.1).values():
        assert result.losses.reason.startswith("the driver did not answer in time")
        assert len(read(result).start_ns) >= 3
    assert not Path(f"/proc/{pids[0]}").exists()


def test_an_abandoned_recording_leaves_no_process(reader: GpuReader, tmp_path: Path) -> None:
    async def abandon() -> None:
        recording = await record_power(reader, {GPUS[0]: [tmp_path]}, period_ns=10 * MS)
        process = recording._process
        assert process is not None
        recording.abandon()
        await process.wait()
        await recording.stop()

    asyncio.run(abandon())


def test_each_folder_of_a_gpu_has_the_rows_up_to_its_end(reader: GpuReader, tmp_path: Path) -> None:
    early, late, other = (tmp_path / name for name in ("early", "late", "other"))
    for folder in (early, late, other):
        folder.mkdir()

    async def record() -> None:
        recording = await record_power(reader, {GPUS[0]: [early, late], GPUS[1]: [other]}, period_ns=10 * MS)
        try:
            await soon(lambda: rows_in(early, GPUS[0]), "it is read")
            end_ns = time.time_ns()
            (first,) = await recording.leave(early, end_ns, 20)
            assert (first.gpu_uuid, first.path) == (GPUS[0], early / f"{GPUS[0]}.power.counters")
            assert first.start_ns < end_ns <= first.end_ns
            shutil.rmtree(early)  # decoded
            (second,) = await recording.leave(late, time.time_ns(), 20)
            assert (second.losses.code, second.start_ns) == ("", first.start_ns)
            assert second.losses.rows > first.losses.rows
            assert recording.bytes_written >= 56 * 2 * first.losses.rows
        finally:
            await recording.stop()

    asyncio.run(record())


def test_a_gpu_that_is_ended_early_has_the_reason_and_the_other_goes_on(reader: GpuReader, tmp_path: Path) -> None:
    async def body(recording: PowerRecording) -> None:
        await until_more_rows(tmp_path)
        recording.end_gpu(GPUS[0], CounterError(CounterCode.NOT_PERMITTED, "somebody else is on it"))
        recording.end_gpu(GPUS[0], CounterError(CounterCode.NOT_PERMITTED, "said twice"))
        recording.end_gpu("GPU-none", CounterError(CounterCode.NOT_PERMITTED, "unknown"))
        await until_more_rows(tmp_path, GPUS[1:], 10)

    results = recorded(reader, tmp_path, body)
    ended, other = results[GPUS[0]], results[GPUS[1]]
    assert (ended.losses.code, ended.losses.reason) == (CounterCode.NOT_PERMITTED, "somebody else is on it")
    assert other.losses.code == "" and ended.end_ns < other.end_ns


def test_a_recording_ends_with_its_longest_duration(reader: GpuReader, tmp_path: Path) -> None:
    async def body(recording: PowerRecording) -> None:
        assert recording._process is not None
        await recording._process.wait()

    result = recorded(reader, tmp_path, body, GPUS[:1], most_ns=1500 * MS)[GPUS[0]]
    assert result.losses.reason.startswith("the power readings ended early: the maximum duration was reached")


def test_a_full_file_ends_the_rows_of_its_gpu(reader: GpuReader, tmp_path: Path) -> None:
    async def body(recording: PowerRecording) -> None:
        await soon(lambda: recording._news[GPUS[0]].code, "it is told")

    result = recorded(reader, tmp_path, body, GPUS[:1], max_bytes=5 * 56)[GPUS[0]]
    assert result.losses.reason.startswith("the power readings ended early: their file is full")
    assert len(read(result).start_ns) == 5


def test_a_file_that_is_there_is_left_alone_and_the_other_gpu_is_read(reader: GpuReader, tmp_path: Path) -> None:
    taken = tmp_path / f"{GPUS[0]}.power.counters"
    taken.write_text("mine")

    async def body(recording: PowerRecording) -> None:
        refused = {each.gpu_uuid: each.losses.reason for each in recording.refused}
        assert "not a valid GPU UUID" in refused["../GPU-0"] and GPUS[0] in refused

    results = recorded(reader, tmp_path, body, [*GPUS, "../GPU-0"])
    assert "File exists" in results[GPUS[0]].losses.reason and taken.read_text() == "mine"
    assert not (tmp_path.parent / "GPU-0.power.counters").exists()
    assert results[GPUS[1]].losses.code == ""


def test_a_program_that_cannot_be_started_refuses_all(reader: GpuReader, tmp_path: Path) -> None:
    async def body(recording: PowerRecording) -> None:
        assert recording.gpus == () and len(recording.refused) == 2

    results = recorded(reader, tmp_path, body, command=["/nonexistent"])
    reason = "the process that reads power cannot be started: No such file or directory"
    assert [result.losses.reason for result in results.values()] == [reason, reason]
    assert list(tmp_path.glob("*.counters")) == []


@pytest.mark.parametrize("answer", ["nonsense", '{"gpu": 7}', '{"gpu": -1}'])
def test_a_program_that_answers_nonsense_is_refused(reader: GpuReader, tmp_path: Path, answer: str) -> None:
    program = f"import sys; print({answer!r}, flush=True); sys.stdin.read()"
    results = recorded(reader, tmp_path, nothing, command=[sys.executable, "-c", program])
    assert all("sent an invalid answer" in result.losses.reason for result in results.values())


class KnownGpus(GpuReader):
    """A reader that has read these."""

    def __init__(self, *gpus: GpuState) -> None:
        super().__init__(command=["/nonexistent"])
        self._known = Snapshot(gpus=gpus, time_ns=1)

    def latest(self, max_age_s: float = float("inf"), question: GpuQuestion = GpuQuestion.EVERYTHING) -> Snapshot:
        return self._known


def test_gpus_of_other_vendors_are_read_where_they_are(tmp_path: Path) -> None:
    program = "import sys; line = sys.stdin.readline(); open(sys.argv[1], 'w').write(line); print(sys.argv[2])"
    refusal = msgspec.json.encode(PowerNews(gpu=0, code=CounterCode.UNAVAILABLE, reason="none")).decode()
    reader = KnownGpus(
        GpuState(vendor="nvidia", index=0, uuid="GPU-1", name="", pci_bus_id="00000000:18:00.0"),
        GpuState(vendor="amd", index=1, uuid="9f0c", name="", pci_bus_id="0000:c1:00.0"),
    )
    command = [sys.executable, "-c", program, str(tmp_path / "asked"), refusal]
    recorded(reader, tmp_path, nothing, ["GPU-1", "9f0c"], command=command)
    request = msgspec.json.decode((tmp_path / "asked").read_bytes(), type=PowerRequest)
    assert [(gpu.uuid, gpu.pci_bus_id) for gpu in request.gpus] == [("GPU-1", ""), ("9f0c", "0000:c1:00.0")]
