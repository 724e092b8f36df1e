"""Power, clocks and throttling in traces with hardware counters: real daemon, agent and processes on fakes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import open_trace
from kineto_trace.model.trace import Trace
from support.counters.sampled_host import SampledHost, sampled_host
from support.losses import without_losses
from support.service.cli import run_process
from support.waiting import until

POWER_LABELS = {
    "Power", "Power, mean", "Power limit", "SM clock", "SM clock maximum", "Memory clock", "Temperature",
    "Throttled by power", "Throttled by heat", "Throttled by hardware",
}  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SampledHost]:
    with sampled_host(tmp_path) as started:
        yield started


def traced(host: SampledHost, folder: Path, pid: int) -> tuple[Any, Trace]:
    """What a capture of 400 ms says of its target, and its trace."""
    folder.mkdir()
    arguments = ["trace", "--pid", str(pid), "-o", "json", "--counters", "--duration", "400ms"]
    result = run_process(arguments, host.daemon.client_environ(), folder)
    assert result.code == 0, result.stderr
    capture = result.json()
    (path,) = (host.daemon.state_dir / "captures" / capture["id"] / "targets").glob(f"{pid}-*")
    return capture, open_trace(path)


def values(trace: Trace, label: str) -> Any:
    rows = trace.table("counter")
    return rows["value"][rows["name"] == trace.strings.index(label)]


def labels(trace: Trace) -> set[str]:
    return {trace.strings[number] for number in np.unique(trace.table("counter")["name"]).tolist()}


def no_reader_of_power(host: SampledHost) -> bool:
    return not any(_reads_power_for(process, host.daemon.pid) for process in Path("/proc").glob("[0-9]*"))


def _reads_power_for(process: Path, daemon: int) -> bool:
    try:
        command, status = (process / "cmdline").read_bytes(), (process / "stat").read_text()
    except OSError:
        return False
    return b"kinetod.counters.power.power_process" in command and int(status.rpartition(")")[2].split()[1]) == daemon


def test_power_clocks_and_throttling_are_in_the_trace_beside_the_counters(host: SampledHost, tmp_path: Path) -> None:
    program = host.train(1)
    host.say("reasons 4")
    capture, trace = traced(host, tmp_path / "out", program.pid)
    (target,) = capture["targets"]
    assert (target["verdict"], without_losses(target["warnings"])) == ("VERDICT_DONE", [])
    assert len(capture["counters"]) == 1
    assert labels(trace) > POWER_LABELS | {"GPU busy"}
    rows = trace.table("counter")
    power = rows["name"] == trace.strings.index("Power")
    start, end = rows["start"][power], rows["start"][power] + rows["duration"][power]
    whole = start.min() <= trace.window_start_ns and end.max() >= trace.window_end_ns
    assert whole or target["warnings"]  # a busy machine loses some, and says so
    assert (start[1:] >= end[:-1]).all()
    assert set(rows["device"][power].tolist()) == {0}  # the host's GPU 1, as the process sees it
    assert {trace.strings[number] for number in rows["unit"][power].tolist()} == {"W"}
    assert values(trace, "Power").tolist() == pytest.approx([498.001] * power.sum())
    assert values(trace, "Throttled by power").all() and not values(trace, "Throttled by heat").any()
    until(lambda: no_reader_of_power(host), "the process has ended with the capture")


def test_power_is_there_where_somebody_else_has_the_counters(host: SampledHost, tmp_path: Path) -> None:
    program = host.train(0)
    host.sampling.play("fail=cuptiPmSamplingSetConfig:26")
    capture, trace = traced(host, tmp_path / "out", program.pid)
    (target,) = capture["targets"]
    assert target["verdict"] == "VERDICT_DONE"
    assert [each["reason_code"] for each in capture["counters"]] == ["COUNTERS_BUSY"]
    (warning,) = without_losses(target["warnings"])
    assert "hardware counters of GPU 0: none were sampled" in warning
    assert labels(trace) == POWER_LABELS


def test_a_driver_that_hangs_takes_the_power_alone(host: SampledHost, tmp_path: Path) -> None:
    program = host.train(0)
    host.say("hang_reasons 0")
    capture, trace = traced(host, tmp_path / "out", program.pid)
    (target,) = capture["targets"]
    assert target["verdict"] == "VERDICT_DONE"
    assert [each["reason_code"] for each in capture["counters"]] == [""]
    hung = "power and clocks of GPU 0: the driver did not answer in time; readings are missing"
    assert without_losses(target["warnings"]) == [hung]
    assert "GPU busy" in labels(trace) and not labels(trace) & POWER_LABELS
    until(lambda: no_reader_of_power(host), "the process has ended with the capture")
