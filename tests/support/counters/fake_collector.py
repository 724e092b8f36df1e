"""The part of cupti-python that kinetod uses, as the package's public signatures have it, without CUPTI."""

import time
from types import ModuleType, SimpleNamespace
from typing import Any

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
