"""A backend without a driver: it samples in Python, and does what a test says."""

import threading
from collections.abc import Callable

import numpy as np
from kinetod.counters.interface import (
    CounterDevice,
    CounterError,
    CounterMetric,
    CounterPlan,
    Sampling,
    WantedCounters,
)
from kinetod.counters.sample_rings import STOPPED, RingWriter


class _MemorySampling:
    def __init__(
        self, plan: CounterPlan, ring: RingWriter, rows_ns: tuple[int, ...], ends: threading.Event | None
    ) -> None:
        self.plan = plan
        self._ring = ring
        self._rows_ns = rows_ns
        self._ends = ends

    def run(self) -> None:
        for begin_ns in self._rows_ns:
            self._ring.put(begin_ns, begin_ns + 1000, np.array([7.0], dtype=np.float32))
        while not self._ring.wait(3600):
            pass
        if self._ends is not None:
            self._ends.wait()
        self._ring.end(STOPPED)

    def close(self) -> None:
        pass


class MemoryBackend:
    """Implements CounterBackend with two GPUs. error: what `start` raises; hang: what `start` waits for before;
    ends: what the end of a sampling waits for; rows_ns: when the samples begin.
    """

    name = "memory"
    serves_once = False
    library_version = "1"

    def __init__(self) -> None:
        self.error: CounterError | None = None
        self.hang: threading.Event | None = None
        self.ends: threading.Event | None = None
        self.rows_ns: tuple[int, ...] = (1000,)

    def open(self) -> None:
        pass

    def devices(self) -> list[CounterDevice]:
        return [
            CounterDevice(uuid=f"GPU-{index}", index=index, name="memory", chip="MEM", pci_bus_id="0000:01:00.0")
            for index in range(2)
        ]

    def base_metrics(self, uuid: str) -> list[str]:
        return [
            f"metric_{number:04d}_of_a_long_name_that_fills_a_packet_of_the_protocol_soon" for number in range(4000)
        ]

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        return CounterPlan(metrics=(CounterMetric(name="metric", label="Metric", unit="%"),))

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> Sampling:
        if self.hang is not None:
            self.hang.wait()
        if self.error is not None:
            raise self.error
        return _MemorySampling(self.plan(uuid, wanted), make_ring(1), self.rows_ns, self.ends)
