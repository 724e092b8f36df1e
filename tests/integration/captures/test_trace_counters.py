"""Traces with hardware counters: real daemon, agent and kinetod-counters on fakes of the driver and of CUPTI."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import open_trace
from kineto_trace.model.trace import Trace
from support.counters.fake_pm_sampling import UUID
from support.counters.sampled_host import SampledHost, sampled_host
from support.service.cli import Result, run_process

MS = 1_000_000


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SampledHost]:
    with sampled_host(tmp_path) as started:
        yield started


def trace(host: SampledHost, folder: Path, *arguments: str, pids: tuple[int, ...]) -> Result:
    named = [argument for pid in pids for argument in ("--pid", str(pid))]
    folder.mkdir(exist_ok=True)
    return run_process(["trace", *named, "-o", "json", *arguments], host.daemon.client_environ(), folder)


def stored(host: SampledHost, capture: Any, number: int = 0) -> Trace:
    target = capture["targets"][number]
    folder = host.daemon.state_dir / "captures" / capture["id"] / "targets"
    (path,) = folder.glob(f"{target['pid']}-*")
    return open_trace(path)


def labels(trace: Trace) -> set[str]:
    return {trace.strings[number] for number in np.unique(trace.table("counter")["name"]).tolist()}


def test_samples_of_the_whole_window_are_in_the_trace_by_device(host: SampledHost, tmp_path: Path) -> None:
    program = host.train(1)
    result = trace(host, tmp_path / "out", "--counters", "--duration", "400ms", pids=(program.pid,))
    assert result.code == 0, result.stderr
    capture = result.json()
    (target,) = capture["targets"]
    assert (target["verdict"], target["warnings"]) == ("VERDICT_DONE", [])
    (sampled,) = capture["counters"]
    assert (sampled["gpu"]["index"], sampled["gpu"]["uuid"], sampled["reason_code"]) == (1, UUID.format(1), "")
    assert sampled["samples"] > 400 and sampled["gaps"] == sampled["dropped_samples"] == 0
    read = stored(host, capture)
    rows = read.table("counter")
    assert set(rows["device"].tolist()) == {0}  # as the process sees it
    assert {"GPU busy", "SM busy", "Tensor pipe", "DRAM"} <= labels(read)
    busy = rows["name"] == read.strings.index("GPU busy")
    start, end = rows["start"][busy], rows["start"][busy] + rows["duration"][busy]
    assert 390 <= busy.sum() <= 410
    assert start.min() <= read.window_start_ns and end.max() >= read.window_end_ns
    assert (rows["value"][busy] // 1000 == 1).all()  # of the host's GPU 1
    assert host.sampling.wrong() == []
