"""An optional backend: samples through the package cupti-python, which users install themselves.

Its licence is NVIDIA's own, so it is neither a dependency nor part of any package of ours; it is imported on demand, in
kinetod-counters only. GPUs and metrics are listed as in the backend `cupti`, by the same libcupti: the package loads
one only when it is first used, and then the one that the process has loaded under its name.

Disabling its Collector shuts CUPTI's profiler down for the whole process. So one GPU is sampled at a time, and the
process ends after its first sampling; the next request starts another one.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from kineto_trace.base.install_advice import install_advice

from kinetod.counters.cupti_backend import (
    CUPTI,
    HARDWARE_BUFFER_BYTES,
    HARDWARE_BUSY,
    POLL_NS,
    CuptiBackend,
    find_libraries,
    rights_problem,
)
from kinetod.counters.interface import CounterCode, CounterError, CounterPlan, WantedCounters
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, Failure, RingWriter

_LEAST_SAMPLES, _MOST_SAMPLES, _POLLS_IN_IMAGE = 64, 4096, 4
_DECODE = b"cupti.pm_sampling.Collector.decode"


class CuptiPythonSampling:
    """A GPU that is being sampled by a Collector."""

    def __init__(self, collector: Any, plan: CounterPlan, interval_ns: int, ring: RingWriter) -> None:
        self.plan = plan
        self._collector = collector
        self._interval_ns = interval_ns
        self._ring = ring
        self._latest_end = 0
        polled = POLL_NS // interval_ns + 1
        self._samples = min(max(_LEAST_SAMPLES, _POLLS_IN_IMAGE * polled), _MOST_SAMPLES)
        self._poll_s = min(POLL_NS, self._samples * interval_ns // _POLLS_IN_IMAGE) / 1e9

    def run(self) -> None:
        """Decodes until the end."""
        end, failure = STOPPED, None
        left_s = self._ring.most_ns / 1e9
        try:
            while not self._ring.wait(min(self._poll_s, max(0.0, left_s))):
                left_s -= self._poll_s
                if left_s <= 0:
                    end = TOO_LONG
                    break
                self._decode()
            self._collector.stop()
            self._decode()
        except Exception as exc:  # noqa: BLE001  # whatever the package raises ends the sampling
            end = ERROR
            failure = Failure(kind=CUPTI, result=_status(exc), call=_DECODE, text=str(exc).encode()[:400])
        self.close()
        self._ring.end(end, failure)

    def _decode(self) -> None:
        for sample in self._collector.decode(max_samples=self._samples):
            start_ns, end_ns, latest = sample.start_timestamp, sample.end_timestamp, self._latest_end
            if latest and start_ns - latest >= self._interval_ns / 2:
                self._ring.note_gap(start_ns - latest)
            if latest and start_ns >= latest and end_ns > start_ns:  # the first one covers the time since a reset
                self._ring.put(start_ns, end_ns, np.array(sample.metric_values, dtype=np.float32))
            self._latest_end = max(latest, end_ns)

    def close(self) -> None:
        """Releases the counters."""
        collector, self._collector = self._collector, None
        if collector is not None:
            with contextlib.suppress(Exception):  # the process ends after this
                collector.disable()


class CuptiPythonBackend(CuptiBackend):
    """Implements interface.CounterBackend."""

    name = "cupti-python"
    serves_once = True

    def __init__(self, library: str = "", **options: Any) -> None:
        super().__init__(library, **{"find": find_libraries, **options})
        self._used = threading.Lock()

    def open(self) -> None:
        """Imports the package and loads the libcupti that it will use."""
        _collectors()
        super().open()

    def start(  # type: ignore[override]
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> CuptiPythonSampling:
        """Starts the sampling."""
        package = _collectors()
        plan = self.plan(uuid, wanted)
        index = self._gpu(uuid).index
        if not self._used.acquire(blocking=False):
            reason = f"GPU {uuid}: cupti-python can sample only one GPU at a time; wait for the other sampling to end"
            raise CounterError(CounterCode.BUSY, reason)
        collector = package.Collector(index)
        try:
            collector.enable()
            collector.configure(
                metrics=[metric.name for metric in plan.metrics],
                hardware_buffer_size=HARDWARE_BUFFER_BYTES,
                sampling_interval=interval_ns,
                trigger_mode=package.TriggerMode.GPU_TIME_INTERVAL,
                hw_buffer_append_mode=package.HardwareBufferAppendMode.KEEP_LATEST,
            )
            collector.start()
        except Exception as exc:
            with contextlib.suppress(Exception):
                collector.disable()
            raise _refusal(exc, uuid) from exc
        return CuptiPythonSampling(collector, plan, interval_ns, make_ring(len(plan.metrics)))


def _collectors() -> Any:
    """The module with the Collector. Raises CounterError."""
    try:
        return importlib.import_module("cupti.pm_sampling")
    except Exception as exc:
        advice = f"{install_advice('cupti-python')}, or choose the backend cupti"
        reason = f"cupti-python cannot be imported ({exc}): {advice}"
        raise CounterError(CounterCode.UNAVAILABLE, reason) from exc


def _status(error: Exception) -> int:
    """The CUptiResult of an error of the package; 0 if it has none."""
    status = getattr(error, "status", 0)
    return int(status) if isinstance(status, int) else 0


def _refusal(error: Exception, uuid: str) -> CounterError:
    if _status(error) == HARDWARE_BUSY:
        return CounterError(CounterCode.BUSY, f"GPU {uuid}: another process is using its counters")
    if isinstance(error, PermissionError):
        return CounterError(CounterCode.NOT_PERMITTED, f"GPU {uuid}: {rights_problem()}")
    if isinstance(error, ValueError):
        return CounterError(CounterCode.INVALID_METRIC, f"GPU {uuid}: {error}")
    return CounterError(CounterCode.FAILED, f"GPU {uuid}: cupti-python: {error}")
