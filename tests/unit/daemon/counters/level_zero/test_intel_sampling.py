"""kinetod-counters with GPUs of Intel's: its process, Debian's real loader, and a driver that checks each call."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kinetod.counters.backend_group import LEVEL_ZERO
from kinetod.counters.counter_client import CounterClient, CounterLosses, CountersService
from kinetod.counters.interface import CounterCode, CounterError, CounterPlan, WantedCounters
from kinetod.counters.sample_rings import RingStatus
from support.counters.fake_intel_metrics import UUIDS, FakeIntelMetrics, IntelSampler, running_sampler
from support.waiting import scaled, soon, until

OVERVIEW = WantedCounters(set_name="overview")
MS = 1_000_000
SEQUENCE = [
    "zetContextActivateMetricGroups", "zetMetricStreamerOpen", "zetMetricStreamerReadData",
    "zetMetricGroupCalculateMetricValues", "zetMetricStreamerClose",
]  # fmt: skip


class Sampled:
    """What came of a sampling."""

    def __init__(
        self, plan: CounterPlan, rows: npt.NDArray[np.void], status: RingStatus, losses: CounterLosses
    ) -> None:
        self.plan, self.rows, self.status, self.losses = plan, rows, status, losses

    def values(self, label: str) -> npt.NDArray[np.float32]:
        (place,) = [place for place, each in enumerate(self.plan.metrics) if each.label == label]
        found: npt.NDArray[np.float32] = self.rows["values"][:, place]
        return found

    def holes(self) -> list[int]:
        between = self.rows["start_ns"][1:] - self.rows["end_ns"][:-1]
        return [int(length) for length in between if length]


async def sample(
    client: CounterClient, rows: int = 60, *, wanted: WantedCounters = OVERVIEW, interval_ns: int = MS, gpu: int = 0
) -> Sampled:
    """Until so many rows have come, or it has ended."""
    session = await client.start(UUIDS[gpu], wanted, interval_ns)
    taken = []

    def enough() -> bool:
        taken.append(session.take())
        return sum(map(len, taken)) >= rows or session.status().ended

    await soon(enough, "there are rows")
    await session.stop()
    while len(more := session.take()):
        taken.append(more)
    found = Sampled(session.plan, np.concatenate(taken), session.status(), session.verdict())
    session.close()
    return found


async def refusal(client: CounterClient, wanted: WantedCounters = OVERVIEW) -> CounterError:
    with pytest.raises(CounterError) as told:
        await client.start(UUIDS[0], wanted, MS)
    return told.value


def test_gpus_are_named_as_the_daemon_names_them(sampler: IntelSampler) -> None:
    found = sampler.ask(lambda client: client.gpus())
    assert (found.backend, found.library_version) == ("level-zero", "1.9")
    assert [(gpu.uuid, gpu.index, gpu.name, gpu.pci_bus_id, gpu.problem) for gpu in found.gpus] == [
        (UUIDS[0], 0, "Fake XPU 0", "0000:03:00.0", ""),
        (UUIDS[1], 1, "Fake XPU 1", "0000:04:00.0", ""),
    ]


def test_a_sampling_makes_its_calls_in_order_and_lets_go_of_the_group(sampler: IntelSampler) -> None:
    found = sampler.ask(sample)
    calls = [call for call in sampler.fake.calls() if call in SEQUENCE]
    assert list(dict.fromkeys(calls)) == SEQUENCE
    assert calls[-2:] == ["zetMetricStreamerClose", "zetContextActivateMetricGroups"]
    assert (found.losses.code, found.losses.reason) == ("", "")


def test_rows_abut_and_have_the_values_of_their_report_in_unix_time(sampler: IntelSampler) -> None:
    began = time.time_ns()
    found = sampler.ask(lambda client: sample(client, 300))
    assert found.holes() == [] and found.status.gaps == 0
    rows = found.rows
    # Readings of the clock may be held up on a busy machine, each by some milliseconds.
    assert began - 20 * MS < rows["start_ns"][0] < rows["end_ns"][-1] < time.time_ns() + 20 * MS
    assert rows["end_ns"][-1] - rows["start_ns"][0] == pytest.approx(len(rows) * MS, abs=20 * MS)
    busy = found.values("GPU busy")
    assert (np.diff(busy) % 100 == 1).all()
    assert (found.values("SM busy") == 60).all()
    assert (found.values("Occupancy") == 50).all()
    assert (found.values("GPC clock") == np.float32(1.5e9)).all()
    assert found.values("DRAM bytes read") == pytest.approx(2e11, rel=1e-5)
    assert found.values("DRAM bytes written") == pytest.approx(1e11, rel=1e-5)


def test_two_gpus_are_sampled_at_once(sampler: IntelSampler) -> None:
    async def both(client: CounterClient) -> list[Sampled]:
        return list(await asyncio.gather(sample(client, gpu=0), sample(client, gpu=1)))

    assert all(len(each.rows) >= 60 and not each.losses.code for each in sampler.ask(both))


@pytest.mark.parametrize("plan", ["gap 20", "drop 20"])
def test_missing_reports_are_a_counted_loss(sampler: IntelSampler, plan: str) -> None:
    """The report after three that are missing tells of the time of four."""
    sampler.fake.play(plan)
    found = sampler.ask(sample)
    assert (found.status.gaps, found.status.lost_ns) == (1, 4 * MS)
    assert len(found.holes()) == 1
    assert "are missing, in 1 place" in found.losses.reason


def test_a_report_of_a_switch_between_contexts_is_a_sample_of_its_own(sampler: IntelSampler) -> None:
    sampler.fake.play("context 20")
    wanted = WantedCounters(metrics=("GpuTime", "GPU_MEMORY_BYTE_READ"))
    found = sampler.ask(lambda client: sample(client, wanted=wanted))
    lengths, read = found.rows["values"].T
    assert lengths[lengths != MS].tolist() == [MS * 3 / 4, MS / 4]
    assert found.holes() == [] and found.status.gaps == 0 and read == pytest.approx(2e11, rel=1e-5)


def test_the_interval_is_the_one_that_the_hardware_has(sampler: IntelSampler) -> None:
    sampler.fake.play(f"period {2 * MS}")
    found = sampler.ask(sample)
    assert found.rows["end_ns"][-1] - found.rows["start_ns"][0] == pytest.approx(len(found.rows) * 2 * MS, abs=20 * MS)
    assert found.status.gaps == 0


def test_a_second_sampling_tells_nothing_of_the_time_between_the_two(sampler: IntelSampler) -> None:
    sampler.ask(sample)
    began = time.time_ns()
    assert sampler.ask(sample).rows["start_ns"][0] > began - 20 * MS


@pytest.mark.parametrize("late_ns", [3_000 * MS, 10 * MS * 100])
def test_times_of_another_clock_end_the_sampling_instead_of_being_told(sampler: IntelSampler, late_ns: int) -> None:
    sampler.fake.play(f"late {late_ns}")
    found = sampler.ask(sample)
    assert len(found.rows) == 0 and found.losses.code == CounterCode.FAILED
    assert "the samples' timestamps come from another clock" in found.losses.reason


@pytest.mark.parametrize(
    ("call", "result", "code", "reason"),
    [
        ("zetContextActivateMetricGroups", 0x7FFFFFFE, CounterCode.FAILED, "returned 0x7ffffffe"),
        (
            "zetMetricStreamerOpen",
            0x70010001,
            CounterCode.BUSY,
            "is using its counters, which only one process can use at a time",
        ),
        ("zetMetricStreamerOpen", 0x7FFFFFFE, CounterCode.FAILED, "gives no reason; if another process"),
        ("zetMetricStreamerOpen", 0x70010000, CounterCode.NOT_PERMITTED, "CAP_PERFMON"),
        ("zetMetricStreamerOpen", 0x70000001, CounterCode.UNAVAILABLE, "the driver has lost the GPU"),
    ],
)
def test_a_refused_start_says_why_and_leaves_nothing_held(
    sampler: IntelSampler, call: str, result: int, code: CounterCode, reason: str
) -> None:
    sampler.fake.play(f"fail.{call} {result}")
    error = sampler.ask(refusal)
    assert error.code is code and reason in error.reason and UUIDS[0] in error.reason
    sampler.fake.play()
    assert len(sampler.ask(sample).rows) >= 60


@pytest.mark.parametrize("call", ["zetMetricStreamerReadData", "zetMetricGroupCalculateMetricValues"])
def test_a_failure_while_sampling_ends_it_with_what_was_seen_and_frees_the_counters(
    sampler: IntelSampler, call: str
) -> None:
    async def failing(client: CounterClient) -> CounterLosses:
        session = await client.start(UUIDS[0], OVERVIEW, MS)
        await soon(lambda: session.status().written > 20, "there are rows")
        sampler.fake.play(f"fail.{call} {0x7FFFFFFE}")
        await soon(lambda: session.status().ended, "it has ended")
        await session.stop()
        losses = session.verdict()
        session.close()
        return losses

    losses = sampler.ask(failing)
    assert losses.code == CounterCode.FAILED and f"{call}: {call} returned 0x7ffffffe" in losses.reason
    assert losses.rows > 20
    sampler.fake.play()
    assert len(sampler.ask(sample).rows) >= 60


def test_a_process_whose_stream_the_driver_does_not_close_says_so_and_ends(tmp_path: Path) -> None:
    with running_sampler(tmp_path) as kept:
        kept.fake.play(f"fail.zetMetricStreamerClose {0x7FFFFFFE}")
        assert "zetMetricStreamerClose returned 0x7ffffffe" in kept.ask(sample).losses.reason
        until(kept.ended, "it has ended")


def test_who_comes_second_on_a_host_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with running_sampler(tmp_path) as first:
        first.fake.play("busy 1", f"busy_code {0x70010001}")
        command = first.fake.counters("--backend", LEVEL_ZERO, "--socket", str(tmp_path / "second.sock"))
        environ = {**os.environ, **first.fake.environ}
        with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as second:
            try:
                first.ask(lambda client: both_of(client, tmp_path / "second.sock"))
            finally:
                second.kill()
        assert first.fake.wrong() == []


async def both_of(client: CounterClient, second: Path) -> None:
    await soon(second.is_socket, "the second one listens")
    session = await client.start(UUIDS[0], OVERVIEW, MS)
    error = await refusal(CounterClient(CountersService(second), answer_s=scaled(30)))
    assert error.code is CounterCode.BUSY
    before = session.status().written
    await soon(lambda: session.status().written > before + 100, "rows come")
    await session.stop()
    assert session.verdict().code == ""
    session.close()


def test_a_killed_process_frees_the_counters_and_its_rows_stay(tmp_path: Path) -> None:
    with running_sampler(tmp_path) as killed:
        killed.fake.play("busy 1")

        async def body(client: CounterClient) -> int:
            session = await client.start(UUIDS[0], OVERVIEW, MS)
            await soon(lambda: session.status().written > 20, "there are rows")
            killed.process.send_signal(signal.SIGKILL)
            await session.stop()
            assert "kinetod-counters has ended" in session.verdict().reason
            rows = len(session.take())
            session.close()
            return rows

        assert killed.ask(body) > 20
    (tmp_path / "counters.sock").unlink(missing_ok=True)
    with running_sampler(tmp_path) as again:
        assert len(again.ask(sample).rows) >= 60


def test_metrics_that_a_user_names_are_of_one_group_or_refused_with_where_they_are(sampler: IntelSampler) -> None:
    names = ("XVE_INST_EXECUTED_SEND_ALL", "ComputeBasic.GpuCoreClocks", "GPU_MEMORY_BYTE_READ")
    found = sampler.ask(lambda client: sample(client, wanted=WantedCounters(metrics=names)))
    assert [(each.name, each.unit) for each in found.plan.metrics] == list(
        zip(names, ["event/s", "Hz", "B/s"], strict=True)
    )
    assert found.rows["values"][10] == pytest.approx([5e8, 1.5e9, 2e11], rel=1e-5)
    apart = WantedCounters(metrics=("MemoryProfile.GPU_MEMORY_BYTE_READ", "XVE_ACTIVE"))
    error = sampler.ask(lambda client: refusal(client, apart))
    assert error.code is CounterCode.INVALID_METRIC
    assert "XVE_ACTIVE is in ComputeBasic" in error.reason


def test_a_gpu_without_metrics_is_listed_with_what_to_install(tmp_path: Path) -> None:
    with running_sampler(tmp_path) as without:
        without.fake.play("groups 0")
        (gpu, _) = without.ask(lambda client: client.gpus()).gpus
        assert gpu.code == CounterCode.UNAVAILABLE and "libigdmd.so.1" in gpu.problem
        without.fake.play(f"fail.zetMetricGroupGet {0x70020000}")
        assert "returned 0x70020000" in without.ask(refusal).reason


def test_a_host_without_a_driver_is_told_what_to_install(tmp_path: Path) -> None:
    with running_sampler(tmp_path, ZE_ENABLE_ALT_DRIVERS=str(tmp_path / "none.so")) as without:
        with pytest.raises(CounterError, match=r"does not start with metrics enabled .*libze_intel_gpu") as told:
            without.ask(lambda client: client.gpus())
        assert told.value.code is CounterCode.UNAVAILABLE


def test_a_host_without_the_loader_is_told_what_to_install(tmp_path: Path) -> None:
    fake = FakeIntelMetrics(tmp_path)
    code = "from kinetod.counters.level_zero_backend import LevelZeroBackend as B; B('/none/libze.so').open()"
    told = subprocess.run(fake.command("-P", "-c", code), capture_output=True, text=True, check=False)
    assert "CounterError: /none/libze.so: " in told.stderr
