"""Counts the activity of one NVIDIA GPU's units, by NVML's GPU performance monitoring (GPM), from Hopper on.

Theory of operation
    The GPU's counters always run. `nvmlGpmSampleGet` copies them, `nvmlGpmMetricsGet` computes the difference of two
    copies; two buffers alternate. They are not the counters that profilers reserve: DCGM, Nsight and CUPTI work at the
    same time, and processes on the GPU are not affected. DCGM takes its profiling fields 1001 to 1012 from the same
    calls on these GPUs, by the same numbers of metrics (METRICS) and in the same units: percentages and MiB/s.

    `step` is called every second and for each reading. Missing values are tried again: a metric without a value has no
    total, and a failed call ends all totals, with the reason in `refusal`. After a failure, or if the set of metrics
    with values has changed, totals begin anew. An impossible value (not a number, negative, more than MOST_PERCENT)
    counts as missing.

    In MIG mode the counters are those of the GPU's instances: a value of the whole GPU would be wrong (DCGM#152: shares
    above 1), so there is none.

    The version words of the structures have no size in them, unlike NVML's others, and the driver reads only as many
    metrics as asked for; so the size of the binding's structure, which grew with the list of metrics, does not matter.
"""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import SHARES, GpuActivity

# NVML's numbers; with DCGM's fields in dcgmlib/src/dcgm_fields.cpp (DcgmFieldIdToNvmlGpmMetricId).
METRICS = {
    "graphics_active": 1,  # NVML_GPM_METRIC_GRAPHICS_UTIL, DCGM 1001
    "sm_active": 2,  # SM_UTIL, 1002
    "sm_occupancy": 3,  # SM_OCCUPANCY, 1003
    "tensor_active": 5,  # ANY_TENSOR_UTIL, 1004
    "dram_active": 10,  # DRAM_BW_UTIL, 1005
    "fp64_active": 11,  # FP64_UTIL, 1006
    "fp32_active": 12,  # FP32_UTIL, 1007
    "fp16_active": 13,  # FP16_UTIL, 1008
    "pcie_transmit": 20,  # PCIE_TX_PER_SEC, 1009
    "pcie_receive": 21,  # PCIE_RX_PER_SEC, 1010
    "nvlink_transmit": 61,  # NVLINK_TOTAL_TX_PER_SEC, 1011
    "nvlink_receive": 60,  # NVLINK_TOTAL_RX_PER_SEC, 1012
}
LEAST_S = 0.1  # between two samples: DCGM's shortest interval on these GPUs
MOST_PERCENT = 105.0  # counters are not all copied in the same cycle: slightly above 100 counts as 100
_MIB = 1 << 20
_MIG_ON = 1
OFF = "switched off by metrics.gpu_activity"
IN_MIG_MODE = "in MIG mode the counters are those of GPU instances, which are not measured"
NO_COUNTERS = "the GPU has no such counters, which NVIDIA's have from Hopper on"
OLD_DRIVER = "the driver or nvidia-ml-py is too old for GPM"
NOT_ALLOWED = "the driver refuses them to this user"


class GpmCounter:
    """Totals of one GPU. Not thread-safe.

    nvml: pynvml, initialised. handle: of the GPU. `activity` is None while nothing is counted, for the reason in
    `refusal`.
    """

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._supported: bool | None = None  # None: not checked yet
        self._buffers: list[Any] = []  # the older sample first
        self._sampled_ns: int | None = None  # time of the later one; None: there is none to compare with
        self.activity: GpuActivity | None = None
        self.refusal = ""

    def step(self) -> None:
        """Takes a sample and adds the activity since the last one, unless that is too recent. Raises nothing."""
        if self._sampled_ns is not None and self._clock() - self._sampled_ns < LEAST_S * 1e9:
            return
        nvml = self._nvml
        try:
            if problem := self._unfit():
                self._refuse(problem)
                return
            self._sample()
        except nvml.NVMLError as exc:
            self._refuse(self._reason(exc))
        except AttributeError:  # missing in this pynvml
            self._refuse(OLD_DRIVER)

    def close(self) -> None:
        """Frees the buffers."""
        self._refuse("")
        for buffer in self._buffers:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(buffer)
        self._buffers = []

    def _unfit(self) -> str:
        """Why this GPU has no counters of its own at present. Raises NVMLError, AttributeError."""
        nvml = self._nvml
        if self._supported is None:
            self._supported = bool(nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        if not self._supported:
            return NO_COUNTERS
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(self._handle)
        except nvml.NVMLError as exc:
            if exc.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise
            return ""
        return IN_MIG_MODE if current == _MIG_ON else ""

    def _sample(self) -> None:
        """Takes a sample. Raises NVMLError, AttributeError."""
        nvml = self._nvml
        while len(self._buffers) < 2:
            self._buffers.append(nvml.nvmlGpmSampleAlloc())
        older, newer = self._buffers
        nvml.nvmlGpmSampleGet(self._handle, older)
        self._buffers = [newer, older]
        before_ns, self._sampled_ns = self._sampled_ns, self._clock()
        if before_ns is None:
            self.activity, self.refusal = GpuActivity(since_ns=self._sampled_ns), ""
            return
        self._add(self._rates(), (self._sampled_ns - before_ns) / 1e9, before_ns)

    def _rates(self) -> dict[str, float]:
        """Shares and bytes per second between the two samples. Raises NVMLError, AttributeError."""
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(METRICS)
        asked.sample1, asked.sample2 = self._buffers
        for place, number in enumerate(METRICS.values()):
            asked.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(asked)
        found = {}
        for place, name in enumerate(METRICS):
            metric = asked.metrics[place]
            if metric.nvmlReturn == nvml.NVML_SUCCESS and (rate := _checked(name, metric.value)) is not None:
                found[name] = rate
        return found

    def _add(self, rates: dict[str, float], seconds: float, began_ns: int) -> None:
        known = self.activity
        if known is None or (known.seconds and known.totals.keys() != rates.keys()):
            known = GpuActivity(since_ns=began_ns)
        totals = {name: known.totals.get(name, 0.0) + rate * seconds for name, rate in rates.items()}
        self.activity = GpuActivity(since_ns=known.since_ns, seconds=known.seconds + seconds, totals=totals)

    def _refuse(self, reason: str) -> None:
        self.activity, self.refusal, self._sampled_ns = None, reason, None

    def _reason(self, exc: Any) -> str:
        nvml = self._nvml
        return {
            nvml.NVML_ERROR_NOT_SUPPORTED: NO_COUNTERS,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND: OLD_DRIVER,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: OLD_DRIVER,
            nvml.NVML_ERROR_NO_PERMISSION: NOT_ALLOWED,
        }.get(exc.value, f"NVML: {clean(str(exc), 200)}")


def _checked(name: str, value: float) -> float | None:
    """A share or bytes per second; None if the value is impossible."""
    if not math.isfinite(value) or value < 0:
        return None
    if name not in SHARES:
        return value * _MIB
    return min(value, 100.0) / 100 if value <= MOST_PERCENT else None
