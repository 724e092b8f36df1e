"""On a real GPU: how fine the driver's readings of power are, what reading them costs, and that they are true.

The work is done in this process, and read by the process that reads power for captures, as it always is.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace.spool.counter_samples import CounterSamples, read_counter_samples
from kinetod.counters.power.interface import PERIOD_NS
from kinetod.counters.power.power_process import MOST_SHARE, NvmlPower, open_nvml
from kinetod.counters.power.power_recording import record_power
from kinetod.gpus.gpu_reader import GpuReader
from support.machine.gpus import torch_with_driver

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PHASE_S = 3.0
WITHIN_S = 5.0


def uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def matmuls() -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    end = time.monotonic() + PHASE_S
    while time.monotonic() < end:
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()


def recorded(folder: Path, work: Callable[[], object]) -> tuple[CounterSamples, float]:
    """The readings while that was done, and the share of a core that the process took."""

    async def record() -> tuple[CounterSamples, float]:
        reader = GpuReader()
        recording = await record_power(reader, {uuid(): [folder]})
        process = recording._process
        assert process is not None and recording.gpus == (uuid(),), recording.refused
        began, used = time.monotonic(), cpu_s(process.pid)
        await asyncio.to_thread(work)
        share = (cpu_s(process.pid) - used) / (time.monotonic() - began)
        (result,) = await recording.leave(folder, time.time_ns(), WITHIN_S)
        await recording.stop()
        reader.close()
        assert (result.losses.code, result.losses.gaps) == ("", 0), result.losses.reason
        assert result.path is not None
        return read_counter_samples(result.path), share

    return asyncio.run(record())


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def values(samples: CounterSamples, label: str) -> npt.NDArray[np.float64]:
    (column,) = (place for place, metric in enumerate(samples.header.metrics) if metric.label == label)
    return samples.values[:, column].astype(np.float64)


def mean(samples: CounterSamples, label: str) -> float:
    return float(np.average(values(samples, label), weights=samples.end_ns - samples.start_ns))


def test_how_often_the_driver_has_new_figures() -> None:
    source = NvmlPower(open_nvml(), uuid())
    labels = [metric.label for metric in source.metrics]
    changed: dict[str, list[float]] = {label: [] for label in labels}
    costs: list[float] = []
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before, end = source.read(), time.monotonic() + PHASE_S
    while (now := time.monotonic()) < end:
        if len(costs) % 10 == 0:
            a @ b
        cpu = time.thread_time()
        found = source.read()
        costs.append(time.thread_time() - cpu)
        for label, then, value in zip(labels, before, found, strict=True):
            if then != value:
                changed[label].append(now)
        before = found
    torch.cuda.synchronize()
    periods = {
        label: round(1e3 * statistics.median(np.diff(times)), 1) for label, times in changed.items() if len(times) > 2
    }
    print(
        json.dumps({"new figures every ms": periods, "CPU ms of a reading": round(1e3 * statistics.median(costs), 3)})
    )
    assert len(changed["Power"]) > PHASE_S  # at least once a second


def test_readings_come_in_time_and_cost_little(tmp_path: Path) -> None:
    samples, share = recorded(tmp_path, matmuls)
    lengths = samples.end_ns - samples.start_ns
    print(f"{len(lengths)} readings, every {np.median(lengths) / 1e6:.1f} ms, {100 * share:.1f} % of a core")
    assert np.median(lengths) < 2 * PERIOD_NS
    assert share < 2 * MOST_SHARE


def test_power_and_clocks_follow_the_work(tmp_path: Path) -> None:
    (tmp_path / "idle").mkdir()
    (tmp_path / "busy").mkdir()
    time.sleep(2 * PHASE_S)  # the clocks go down
    idle, _ = recorded(tmp_path / "idle", lambda: time.sleep(PHASE_S))
    busy, _ = recorded(tmp_path / "busy", matmuls)
    for name, samples in (("idle", idle), ("busy", busy)):
        labels = [metric.label for metric in samples.header.metrics]
        print(name, json.dumps({label: round(mean(samples, label), 2) for label in labels}))
    assert mean(busy, "Power") > mean(idle, "Power") + 100
    later = slice(len(busy.start_ns) // 2, None)  # the sensors lag
    instant, counted = (float(np.mean(values(busy, label)[later])) for label in ("Power", "Power, mean"))
    assert counted == pytest.approx(instant, rel=0.15)
    assert values(busy, "Power")[later].max() <= 1.1 * mean(busy, "Power limit")
    assert values(busy, "SM clock").max() <= values(busy, "SM clock maximum").max()
