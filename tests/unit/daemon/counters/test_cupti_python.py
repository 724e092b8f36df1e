"""The backend that samples with cupti-python, whose package is played here."""

import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kinetod.counters.cupti_python import CuptiPythonBackend, CuptiPythonSampling
from kinetod.counters.interface import CounterCode, CounterError, WantedCounters
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, RingReader, RingStatus, RingWriter
from support.counters.fake_pm_sampling import UUID, FakePmSampling
from support.waiting import until

INTERVALS_LATE = 3  # of the planned gap


class CuptiError(Exception):
    """Like the package's: `status` is a CUptiResult."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class FakeCollectors:
    """Stands for the module cupti.pm_sampling. fails: which method raises what; gap_at: samples before a gap."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.configured: dict[str, Any] = {}
        self.fails: tuple[str, Exception] | None = None
        self.gap_at = 0

    def module(self) -> ModuleType:
        """The module."""
        made = ModuleType("cupti.pm_sampling")
        made.Collector = lambda index: _Collector(self, index)  # type: ignore[attr-defined]
        made.TriggerMode = SimpleNamespace(GPU_TIME_INTERVAL=1)  # type: ignore[attr-defined]
        made.HardwareBufferAppendMode = SimpleNamespace(KEEP_LATEST=1)  # type: ignore[attr-defined]
        return made

    def called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails is not None and self.fails[0] == name:
            raise self.fails[1]


class _Collector:
    def __init__(self, host: FakeCollectors, index: int) -> None:
        self._host = host
        self._index = index
        self._next = 0
        self._stopped_ns = 0

    def enable(self) -> None:
        self._host.called("enable")

    def configure(self, **options: Any) -> None:
        self._host.configured = options
        self._host.called("configure")

    def start(self) -> None:
        self._began_ns = time.time_ns()
        self._host.called("start")

    def stop(self) -> None:
        self._stopped_ns = time.time_ns()
        self._host.called("stop")

    def disable(self) -> None:
        self._host.called("disable")

    def decode(self, max_samples: int) -> list[Any]:
        self._host.called("decode")
        interval = self._host.configured["sampling_interval"]
        samples: list[Any] = []
        while len(samples) < max_samples:
            late = INTERVALS_LATE if self._host.gap_at and self._next >= self._host.gap_at else 0
            start = self._began_ns + (self._next + late) * interval
            if start + interval > (self._stopped_ns or time.time_ns()):
                break
            values = [100.0 * number + self._next for number in range(len(self._host.configured["metrics"]))]
            samples.append(SimpleNamespace(start_timestamp=start, end_timestamp=start + interval, metric_values=values))
            self._next += 1
        return samples


GPU = UUID.format(1)
OVERVIEW = WantedCounters(set_name="overview")
MS = 1_000_000


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> FakeCollectors:
    made = FakeCollectors()
    monkeypatch.setitem(sys.modules, "cupti.pm_sampling", made.module())
    return made


@pytest.fixture
def backend(fake: FakePmSampling) -> CuptiPythonBackend:
    return CuptiPythonBackend(str(fake.library), cuda=str(fake.driver))


def test_the_libcupti_of_the_wheel_is_loaded_before_the_package_needs_one(
    fake: FakePmSampling, collectors: FakeCollectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia/cu13/lib/libcupti.so.13"
    library.parent.mkdir(parents=True)
    shutil.copy(fake.library, library)
    monkeypatch.syspath_prepend(tmp_path)
    backend = CuptiPythonBackend(cuda=str(fake.driver))
    assert [gpu.uuid for gpu in backend.devices()] == [UUID.format(0), UUID.format(1)]
    assert collectors.calls == []


class Run:
    def __init__(self, backend: CuptiPythonBackend, most_s: float = 60.0) -> None:
        self._most_s = most_s
        self.sampling: CuptiPythonSampling = backend.start(GPU, OVERVIEW, MS, self._make)
        self.reader = RingReader(os.dup(self._ring.descriptor), self._ring.metrics)
        self.thread = threading.Thread(target=self.sampling.run)
        self.thread.start()

    def _make(self, metrics: int) -> RingWriter:
        self._ring = RingWriter(metrics, most_ns=int(self._most_s * 1e9))
        return self._ring

    def end(self) -> RingStatus:
        self.thread.join()
        self.sampling.close()
        self._ring.close()
        return self.reader.status()


def test_rows_are_the_collectors_samples_without_the_first(
    backend: CuptiPythonBackend, collectors: FakeCollectors
) -> None:
    run = Run(backend)
    until(lambda: run.reader.status().written > 50, "there are rows")
    run.reader.stop()
    assert run.end().end == STOPPED
    rows = run.reader.take()
    assert rows["values"][0].tolist() == [100.0 * metric + 1 for metric in range(8)]
    assert (rows["start_ns"][1:] == rows["end_ns"][:-1]).all()
    assert collectors.calls[:3] == ["enable", "configure", "start"]
    assert collectors.calls[-3:] == ["stop", "decode", "disable"]
    assert collectors.configured["hw_buffer_append_mode"] == 1  # KEEP_LATEST: the package's own default ends for good
    assert (collectors.configured["sampling_interval"], collectors.configured["trigger_mode"]) == (MS, 1)


def test_gaps_are_counted_with_their_length(backend: CuptiPythonBackend, collectors: FakeCollectors) -> None:
    collectors.gap_at = 20
    run = Run(backend)
    until(lambda: run.reader.status().written > 40, "there are rows")
    run.reader.stop()
    status = run.end()
    assert (status.gaps, status.lost_ns) == (1, INTERVALS_LATE * MS)


def test_a_failing_decoding_ends_it_and_gives_the_counters_back(
    backend: CuptiPythonBackend, collectors: FakeCollectors
) -> None:
    collectors.fails = ("decode", CuptiError(8))
    status = Run(backend).end()
    assert (status.end, status.failed_result, status.failure) == (ERROR, 8, "status 8")
    assert collectors.calls[-1] == "disable"


def test_the_longest_duration_ends_it(backend: CuptiPythonBackend, collectors: FakeCollectors) -> None:
    assert Run(backend, most_s=0.1).end().end == TOO_LONG
    assert collectors.calls[-1] == "disable"


@pytest.mark.parametrize(
    ("method", "error", "code"),
    [
        ("configure", CuptiError(26), CounterCode.BUSY),
        ("enable", PermissionError("no"), CounterCode.NOT_PERMITTED),
        ("configure", ValueError("several passes"), CounterCode.INVALID_METRIC),
        ("start", RuntimeError("strange"), CounterCode.FAILED),
    ],
)
def test_what_the_package_raises_has_its_code(
    backend: CuptiPythonBackend, collectors: FakeCollectors, method: str, error: Exception, code: CounterCode
) -> None:
    collectors.fails = (method, error)
    with pytest.raises(CounterError) as told:
        Run(backend)
    assert told.value.code is code
    assert collectors.calls[-1] == "disable"


def test_a_process_samples_once(backend: CuptiPythonBackend, collectors: FakeCollectors) -> None:
    assert backend.serves_once
    run = Run(backend)
    with pytest.raises(CounterError, match="one GPU at a time") as told:
        Run(backend)
    assert told.value.code is CounterCode.BUSY
    run.reader.stop()
    assert run.end().end == STOPPED


def test_a_missing_package_is_told_with_what_to_install(
    backend: CuptiPythonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupti.pm_sampling", None)
    with pytest.raises(CounterError, match=r"pip install cupti-python") as told:
        backend.devices()
    assert told.value.code is CounterCode.UNAVAILABLE
