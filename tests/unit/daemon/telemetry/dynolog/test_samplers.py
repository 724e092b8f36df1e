"""What is measured at intervals: steps, gaps, staleness, and the thread that makes them."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kinetod.gpus.container_owners import GpuContainer
from kinetod.gpus.gpu_activity import GpuActivity
from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from kinetod.gpus.slurm_variables import SlurmNames
from kinetod.telemetry.dynolog.host_values import HostCounters
from kinetod.telemetry.dynolog.json_log import JsonLog
from kinetod.telemetry.dynolog.samplers import Every, GpuSampler, HostSampler
from support.waiting import scaled

SECOND_NS = 10**9


def counters(number: int) -> HostCounters:
    ticks = dict.fromkeys(("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"), 100 * number)
    return HostCounters(time_ns=number * 60 * SECOND_NS, uptime_s=number * 60, cpu_ticks=ticks, interfaces={})


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.partition(" data = ")[2]) for line in path.read_text().splitlines()]


class Readings:
    """What `read` gives next; an exception is raised."""

    def __init__(self, *readings: HostCounters | Exception) -> None:
        self._left = list(readings)

    def __call__(self) -> HostCounters:
        reading = self._left.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading


def test_each_step_of_the_host_is_a_line_and_the_latest_values(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sampler = HostSampler(60.0, json_log=JsonLog(str(path)), read=Readings(counters(1), counters(2)))
    assert sampler.values == {}
    sampler.step()
    assert sampler.values == {"uptime": 60}
    sampler.step()
    assert sampler.values["cpu_u"] == 12.5
    lines = written(path)
    assert (lines[0], lines[1]["uptime"], lines[1]["cpu_u"]) == ({"uptime": 60}, 120, "12.500")


def test_there_is_no_difference_over_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    sampler = HostSampler(60.0, read=Readings(counters(1), OSError("gone"), counters(3), counters(4)))
    seen: list[Mapping[str, object]] = []
    for _ in range(4):
        sampler.step()
        seen.append(sampler.values)
    assert seen[:3] == [{"uptime": 60}, {}, {"uptime": 180}]
    assert seen[3]["cpu_u_ms"] == 1000
    assert "cannot be measured for Dynolog's metrics: gone" in caplog.text


def test_values_older_than_two_intervals_are_none() -> None:
    now = [0.0]
    sampler = HostSampler(60.0, read=Readings(counters(1)), clock=lambda: now[0])
    sampler.step()
    now[0] = 120.0
    assert sampler.values == {"uptime": 60}
    now[0] = 120.1
    assert sampler.values == {}


def gpu(index: int, **changes: object) -> GpuState:
    values = {"vendor": "nvidia", "index": index, "uuid": f"GPU-{index}", "name": "H200"}
    return GpuState(**{**values, **changes})  # type: ignore[arg-type]


def test_each_gpu_that_answers_is_a_line_with_rates_over_the_interval(tmp_path: Path) -> None:
    path = tmp_path / "log"
    left = [
        Snapshot(
            gpus=(gpu(0, nvlink_transmit_bytes=sent), gpu(1, works=False)),
            time_ns=unix_s * SECOND_NS,
            monotonic_ns=second * SECOND_NS,
        )
        for second, unix_s, sent in ((10, 9000, 1000), (20, 5000, 3000))  # the clock was set back
    ]
    pod = GpuContainer(pod="p", namespace="ml", container="c")
    sampler = GpuSampler(
        JsonLog(str(path)),
        read=lambda _deadline_s: left.pop(0),
        owners=lambda _: {"GPU-0": [pod]},
        jobs=lambda: {"0": ("42",)},
    )
    sampler.step()
    sampler.step()
    always = {"device": 0, "gpu_name": "H200", "gpu_uuid": "GPU-0", "job_id": "42"}
    always |= {"pod_namespace": "ml", "pod_name": "p", "container_name": "c"}
    assert written(path) == [always, {**always, "nvlink_tx_bytes": 200}]


def test_a_line_has_what_the_gpus_units_did_and_the_account(tmp_path: Path) -> None:
    path = tmp_path / "log"
    left = [
        Snapshot(
            gpus=(
                gpu(
                    0,
                    processes=(GpuProcess(pid=7),),
                    activity=GpuActivity(since_ns=1, seconds=seconds, totals={"tensor_active": total}),
                ),
            ),
            monotonic_ns=round(seconds * SECOND_NS),
        )
        for seconds, total in ((10.0, 2.0), (20.0, 9.0))
    ]
    said = {7: SlurmNames(account="physics")}
    sampler = GpuSampler(JsonLog(str(path)), read=lambda _deadline_s: left.pop(0), slurm=lambda _: said)
    sampler.step()
    sampler.step()
    first, second = written(path)
    assert "tensorcore_active" not in first
    assert (second["tensorcore_active"], second["slurm_account"]) == ("0.700", "physics")


def stopped_after(wanted: int, step: Callable[[int], None]) -> int:
    """How many steps were made until the thread was stopped after `wanted` of them."""
    made, enough = list[int](), threading.Event()

    def counted() -> None:
        made.append(len(made))
        if len(made) == wanted:
            enough.set()
        step(made[-1])

    every = Every("test", 0.001, counted)
    every.start()
    assert enough.wait(scaled(20))
    every.stop()
    every._thread.join(scaled(20))
    assert not every._thread.is_alive()
    return len(made)


def test_steps_go_on_until_it_is_stopped_whatever_one_of_them_raises(caplog: pytest.LogCaptureFixture) -> None:
    def step(number: int) -> None:
        if number == 1:
            raise RuntimeError("once")

    assert stopped_after(4, step) >= 4
    assert "the next one is in 0.001 s" in caplog.text
