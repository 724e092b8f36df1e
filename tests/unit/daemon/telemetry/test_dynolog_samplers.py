"""What is measured at intervals: steps, gaps, staleness, and the thread that makes them."""

import contextlib
import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kinetod.base.errors import StartError
from kinetod.gpus.gpu_owners import GpuContainer, SlurmNames
from kinetod.gpus.gpu_types import GpuActivity, GpuProcess, GpuState, Snapshot
from kinetod.telemetry.dynolog_page import HostCounters
from kinetod.telemetry.dynolog_samplers import Every, GpuSampler, HostSampler, JsonLog, json_line
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


NS = 1_795_750_800_007_654_321  # 2026-11-27T03:40:00.007Z


def test_a_line_has_the_time_in_utc_sorted_keys_and_fractions_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert json_line(NS, {"uptime": 5120, "cpu_i": 81.25, "rx_bytes.eth0": 0, "gpu_name": 'H"200\n'}) == (
        "time = 2026-11-27T03:40:00.007Z data = "
        r'{"cpu_i":"81.250","gpu_name":"H\"200\n","rx_bytes.eth0":0,"uptime":5120}'
    )


def test_lines_are_appended_and_the_file_may_be_moved_away_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.log"
    log = JsonLog(str(path))
    log.write(NS, {"uptime": 1})
    path.rename(tmp_path / "moved")
    log.write(NS, {"uptime": 2})
    log.write(NS, {"uptime": 3})
    assert [json.loads(line.partition(" data = ")[2]) for line in path.read_text().splitlines()] == [
        {"uptime": 2},
        {"uptime": 3},
    ]
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0


def test_it_grows_to_its_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "metrics.log"
    log = JsonLog(str(path), max_bytes=1000)
    for number in range(200):
        log.write(NS, {"uptime": number})
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000
    kept = ((tmp_path / "metrics.log.1").read_text() + path.read_text()).splitlines()
    assert kept == [json_line(NS, {"uptime": number}) for number in range(200 - len(kept), 200)]
    assert len(kept) > 8
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_file_that_cannot_be_renamed_is_emptied_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.log"
    log = JsonLog(str(path), max_bytes=300)

    def replace(_self: Path, _target: Path) -> Path:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # as where the file alone is mounted into a container

    monkeypatch.setattr(Path, "replace", replace)
    for number in range(20):
        log.write(NS, {"uptime": number})
        assert path.stat().st_size <= 150
    assert path.read_text().splitlines()[-1] == json_line(NS, {"uptime": 19})
    (said,) = [record.getMessage() for record in caplog.records]
    full = f"{path} is full and cannot be renamed: Device or resource busy; it is emptied instead"
    assert (said, log.problem) == (f"metrics.json_log: {full}, now and whenever it reaches 0 MiB", full)
    assert list(tmp_path.iterdir()) == [path]


def test_two_threads_at_the_limit_begin_a_new_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.log"
    log = JsonLog(str(path), max_bytes=300)
    for number in (1, 2):
        log.write(NS, {"uptime": number})
    both, real = threading.Barrier(2), Path.replace

    def replace(self: Path, target: Path) -> Path:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # would let both find the file full
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    threads = [threading.Thread(target=log.write, args=(NS, {"uptime": number})) for number in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [each.read_text().count("\n") for each in (tmp_path / "metrics.log.1", path)]
    assert kept == [2, 2]


def test_a_line_that_a_crash_has_cut_off_is_ended_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.log"
    path.write_text(f"{json_line(NS, {'uptime': 1})}\ntime = 2026-")
    log = JsonLog(str(path))
    log.write(NS, {"uptime": 2})
    JsonLog(str(path))
    assert path.read_text().splitlines() == [
        json_line(NS, {"uptime": 1}), "time = 2026-", json_line(NS, {"uptime": 2}),
    ]  # fmt: skip


def test_links_and_what_is_no_file_are_not_written_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "none/metrics.log"):
        with pytest.raises(StartError, match=rf"metrics.json_log: {tmp_path}/{name} cannot be written"):
            JsonLog(str(tmp_path / name))
    assert target.read_text() == "mine"


def test_what_was_lost_is_said_once_when_it_begins_and_counted_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    log = JsonLog(str(folder / "metrics.log"))
    folder.rename(tmp_path / "gone")
    for _ in range(3):
        log.write(NS, {"uptime": 1})
    assert log.problem == f"{folder}/metrics.log cannot be written: No such file or directory"
    folder.mkdir()
    log.write(NS, {"uptime": 2})
    assert log.problem == ""
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"metrics.json_log: {folder}/metrics.log cannot be written: No such file or directory",
        f"metrics.json_log: {folder}/metrics.log can be written again; 3 lines are missing",
    ]
    assert (folder / "metrics.log").read_text() == f"{json_line(NS, {'uptime': 2})}\n"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.log"
    log = JsonLog(str(path))
    log.write(NS, {"uptime": 1})
    whole = path.read_text()
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    log.write(NS, {"uptime": 2})
    assert path.read_text() == whole

    def full(_file: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.write(NS, {"uptime": 3})
    assert path.read_text() == whole


@pytest.fixture
def _only_errors() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    yield
    root.setLevel(level)


@pytest.mark.usefixtures("_only_errors")
def test_the_daemons_own_log_gets_them_whatever_else_it_shows(caplog: pytest.LogCaptureFixture) -> None:
    JsonLog("log").write(NS, {"uptime": 1})
    assert [record.getMessage() for record in caplog.records] == [json_line(NS, {"uptime": 1})]
