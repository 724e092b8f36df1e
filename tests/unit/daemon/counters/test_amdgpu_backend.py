"""AMD's GPUs in folders that stand for /sys and /proc, sampled in this process."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kinetod.counters import amdgpu_backend
from kinetod.counters.amdgpu_backend import LEAST_NS, AmdgpuBackend, MetricsTable
from kinetod.counters.interface import CounterCode, CounterError, WantedCounters
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, RingReader, RingStatus, RingWriter
from support.counters.gpu_metrics_tables import PlayedAmdgpu, packed
from support.waiting import until

OVERVIEW = WantedCounters(set_name="overview")
UNKNOWN = b"\x08\x00\x03\x00\0\0\0\0"


def backend(played: PlayedAmdgpu) -> AmdgpuBackend:
    made = AmdgpuBackend(sys=played.host.sys, proc=played.host.proc)
    made.open()
    return made


class Sampled:
    """A sampling in a thread."""

    def __init__(
        self, played: PlayedAmdgpu, wanted: WantedCounters, most_ns: int = 10**12, interval_ns: int = LEAST_NS
    ) -> None:
        def make_ring(metrics: int) -> RingWriter:
            self.writer = RingWriter(metrics, most_ns=most_ns)
            return self.writer

        self.sampling = backend(played).start(played.uuids[0], wanted, interval_ns, make_ring)
        self.names = [metric.name for metric in self.sampling.plan.metrics]
        self.reader = RingReader(os.dup(self.writer.descriptor), len(self.names))
        self._thread = threading.Thread(target=self.sampling.run)
        self._thread.start()

    def status(self) -> RingStatus:
        return self.reader.status()

    def end(self) -> RingStatus:
        self.reader.stop()
        self._thread.join()
        self.sampling.close()
        return self.status()

    def close(self) -> None:
        self.end()
        self.reader.close()
        self.writer.close()


@contextmanager
def sampled(played: PlayedAmdgpu, wanted: WantedCounters = OVERVIEW, **more: int) -> Iterator[Sampled]:
    made = Sampled(played, wanted, **more)
    try:
        yield made
    finally:
        made.close()


def test_gpus_have_their_numbers_names_and_chips(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 3), (1, 8))
    made = backend(played)
    assert made.library_version == "6.12.1"  # of the kernel, which the driver is part of
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.chip, gpu.problem) for gpu in made.devices()] == [
        (0, "a000000000000000", "AMD Instinct MI300X", "gfx942", ""),
        (1, "a000000000000001", "AMD Instinct MI300X", "gfx942", ""),
    ]
    assert all(gpu.least_interval_ns == LEAST_NS for gpu in made.devices())
    played.host.write(played.host.sys / "module/amdgpu", {"version": "6.8.5"})
    assert backend(played).library_version == "6.8.5"


def test_samples_abut_and_have_the_means_that_were_played(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    with played.alive(), sampled(played, interval_ns=2 * LEAST_NS) as made:
        until(lambda: made.status().written >= 5, "there are samples")
        status = made.end()
        rows = made.reader.take()
        assert (status.end, status.dropped, status.disordered) == (STOPPED, 0, 0)
        values = dict(zip(made.names, rows["values"].T.tolist(), strict=True))
        assert set(values["average_gfx_activity"]) == {10.0}
        assert set(values["average_umc_activity"]) == {20.0}
        assert values["energy_accumulator"] == pytest.approx([100.0] * len(rows), rel=0.02)
        assert values["ppt_residency_acc"] == pytest.approx([0.5] * len(rows), abs=0.2)
        assert set(values["current_gfxclk"]) == {2050e6}
        lengths = rows["end_ns"] - rows["start_ns"]
        assert (lengths > 0).all()
        between = rows["start_ns"][1:] - rows["end_ns"][:-1]
        assert ((between == 0) | (between > 2 * LEAST_NS)).all()
        behind = status.lost_ns - between.sum()  # by late readings after the last sample, which busy machines have
        assert behind == 0 or (behind > 2 * LEAST_NS and status.gaps > (between > 0).sum())


def test_a_table_that_the_firmware_has_not_renewed_is_no_sample(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    with sampled(played, most_ns=8 * LEAST_NS) as made:
        until(lambda: made.status().ended, "it has ended")
        assert (made.status().end, made.status().written) == (TOO_LONG, 0)


def test_a_reading_that_comes_late_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    monkeypatch.setattr(amdgpu_backend, "LATE", 0)  # so that every reading is late
    with played.alive(), sampled(played) as made:
        until(lambda: made.status().gaps >= 3, "there are gaps")
        status = made.end()
        assert status.written == 0
        assert status.lost_ns >= status.gaps * 1_000_000


def test_a_gpu_in_a_reset_is_read_again_afterwards_and_the_time_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    real, refusals = amdgpu_backend.gpu_table, list[int]()

    def read(folder: Path) -> MetricsTable:
        if len(refusals) < 3:
            refusals.append(1)
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return real(folder)

    with played.alive(), sampled(played, interval_ns=2 * LEAST_NS) as made:
        until(lambda: made.status().written, "there are samples")
        monkeypatch.setattr(amdgpu_backend, "gpu_table", read)
        until(lambda: len(refusals) == 3, "it was refused")
        before = made.status()
        until(lambda: made.status().written > before.written + 2, "it is read again")
        status = made.end()
        assert status.end == STOPPED
        assert status.gaps >= 1 and status.lost_ns >= 3 * 2 * LEAST_NS


@pytest.mark.parametrize(
    ("table", "failure"),
    [(None, "No such file or directory"), (UNKNOWN, "version 3.0 is not supported")],
)
def test_a_gpu_that_goes_away_ends_the_sampling_with_the_reason(
    tmp_path: Path, table: bytes | None, failure: str
) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    with sampled(played) as made:
        if table is None:
            (played.folders[0] / "gpu_metrics").unlink()
        else:
            played.show(0, table)
        until(lambda: made.status().ended, "it has ended")
        status = made.status()
        assert (status.end, status.failed_call) == (ERROR, "gpu_metrics")
        assert failure in status.failure


def test_a_gpu_that_cannot_be_read_for_long_ends_the_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    monkeypatch.setattr(amdgpu_backend, "GIVE_UP_S", 0.0)
    with sampled(played) as made:

        def refuse(_: Path) -> object:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(amdgpu_backend, "gpu_table", refuse)
        until(lambda: made.status().ended, "it has ended")
        assert (made.status().end, made.status().failed_result) == (ERROR, errno.EIO)


def test_a_sleeping_gpu_is_not_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))

    def read(_: Path) -> object:
        raise AssertionError("a sleeping GPU was read")

    with sampled(played, most_ns=8 * LEAST_NS) as made:
        played.host.write(played.folders[0], {"power__runtime_status": "suspended"})
        monkeypatch.setattr(amdgpu_backend, "gpu_table", read)
        (gpu,) = backend(played).devices()
        assert gpu.code == CounterCode.UNAVAILABLE and "reading its counters would wake it" in gpu.problem
        until(lambda: made.status().ended, "it has ended")
        assert made.status().end == TOO_LONG


def test_a_list_of_metrics_must_be_there_and_is_measured_as_named(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 3))
    made, (uuid,) = backend(played), played.uuids
    assert "average_socket_power" in made.base_metrics(uuid)
    plan = made.plan(uuid, WantedCounters(metrics=("current_uclk", "average_socket_power")))
    assert [(metric.label, metric.unit) for metric in plan.metrics] == [("Memory clock", "Hz"), ("Power", "W")]
    for name, why in (
        ("xgmi_read_data_acc", r"\(version 1\.3\) does not have 'xgmi_read_data_acc'"),
        ("sm__cycles_active", "there is no metric 'sm__cycles_active'"),
    ):
        with pytest.raises(CounterError, match=why) as told:
            made.plan(uuid, WantedCounters(metrics=(name,)))
        assert told.value.code is CounterCode.INVALID_METRIC


def test_a_set_that_the_driver_has_nothing_of_says_so(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    with pytest.raises(CounterError, match="does not cover matrix units") as told:
        backend(played).plan(played.uuids[0], WantedCounters(set_name="tensor"))
    assert told.value.code is CounterCode.INVALID_METRIC


def test_a_short_interval_is_refused_with_the_least_one(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))
    with pytest.raises(CounterError, match=r"100 µs is too short.*use at least 10 ms") as told:
        backend(played).start(played.uuids[0], OVERVIEW, 100_000, lambda metrics: RingWriter(metrics, most_ns=1))
    assert told.value.code is CounterCode.INVALID_METRIC


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (UNKNOWN, "version 3.0 is not supported; such tables come from processors with integrated graphics"),
        (packed((1, 8), {}), "for this GPU is empty"),
        (b"", "it has only 0 bytes, too few for a version"),
    ],
)
def test_a_table_that_says_nothing_makes_its_gpu_unavailable(tmp_path: Path, table: bytes, problem: str) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8), (1, 8))
    played.show(0, table)
    first, second = backend(played).devices()
    assert first.code == CounterCode.UNAVAILABLE and problem in first.problem
    assert second.problem == ""
    with pytest.raises(CounterError, match=f"GPU {first.uuid}: "):
        backend(played).plan(first.uuid, OVERVIEW)


@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [
        (FileNotFoundError(errno.ENOENT, "none"), CounterCode.UNAVAILABLE, "no gpu_metrics table for this GPU"),
        (PermissionError(errno.EACCES, "no"), CounterCode.NOT_PERMITTED, "this user cannot read the driver's table"),
        (PermissionError(errno.EPERM, "no"), CounterCode.UNAVAILABLE, "it may be resetting"),
        (OSError(errno.EOPNOTSUPP, "Not supported"), CounterCode.UNAVAILABLE, "Not supported"),
    ],
)
def test_what_the_driver_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, code: CounterCode, problem: str
) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 8))

    def read(_: Path) -> object:
        raise error

    monkeypatch.setattr(amdgpu_backend, "gpu_table", read)
    (gpu,) = backend(played).devices()
    assert gpu.code == code and problem in gpu.problem


def test_a_host_without_such_a_gpu_is_told(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path)
    with pytest.raises(CounterError, match="no AMD GPU on this host uses the amdgpu driver") as told:
        backend(played).devices()
    assert told.value.code is CounterCode.UNAVAILABLE
    with pytest.raises(CounterError, match="no AMD GPU"):
        backend(played).base_metrics("GPU-1")


def test_values_that_are_none_are_nan(tmp_path: Path) -> None:
    played = PlayedAmdgpu(tmp_path, (1, 3))
    played.instead["average_gfx_activity"] = 9700
    wanted = WantedCounters(metrics=("average_gfx_activity", "average_umc_activity"))
    with played.alive(), sampled(played, wanted) as made:
        until(lambda: made.status().written, "there are samples")
        rows = made.reader.take()
        assert np.isnan(rows["values"][:, 0]).all() and set(rows["values"][:, 1].tolist()) == {20.0}
