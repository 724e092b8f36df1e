"""Power, clocks, temperature and throttling of an NVIDIA GPU, through NVML.

Theory of operation
    "Power" is the current power (NVML_FI_DEV_POWER_INSTANT, driver 530 and later), otherwise the result of
    nvmlDeviceGetPowerUsage, which from Ampere on (except GA100) is the mean of the last second. On A100 and H100 an
    instant value covers 25 ms in 100 (arXiv 2312.02741), so there is also "Power, mean", from the GPU's own energy
    counter: exact over 100 ms or more; for a single row limited by the counter's resolution.

    The reasons for lower clocks are the current ones. The driver's own power limit counts as power, and so does the
    external power brake; slowdowns by software and hardware as heat; anything the board's hardware does without the
    driver also counts as hardware.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power.interface import (
    BY_HARDWARE,
    BY_HEAT,
    BY_POWER,
    MEAN_POWER,
    MEMORY_CLOCK,
    MOST_SM_CLOCK,
    POWER,
    POWER_LIMIT,
    SM_CLOCK,
    TEMPERATURE,
    PowerMetric,
)
from kinetod.gpus.gpu_types import LibraryError, LibraryState
from kinetod.gpus.nvml_calls import GpuLost, NvmlCalls, said, text

T = TypeVar("T")

_POWER_INSTANT = 186  # missing in early versions of nvidia-ml-py 12
_HW_SLOWDOWN, _HW_THERMAL, _HW_POWER_BRAKE = 0x8, 0x40, 0x80  # nvmlClocksEventReason…
_SW_POWER_CAP, _SW_THERMAL = 0x4, 0x20
_EVENT = "nvmlClocksEventReason"
_EVENT_REASONS = {
    PowerMetric(name=f"{_EVENT}SwPowerCap|HwPowerBrakeSlowdown", label=BY_POWER, unit=""): (
        _SW_POWER_CAP | _HW_POWER_BRAKE
    ),
    PowerMetric(name=f"{_EVENT}SwThermalSlowdown|HwThermalSlowdown", label=BY_HEAT, unit=""): _SW_THERMAL | _HW_THERMAL,
    PowerMetric(name=f"{_EVENT}HwSlowdown|HwThermalSlowdown|HwPowerBrakeSlowdown", label=BY_HARDWARE, unit=""): (
        _HW_SLOWDOWN | _HW_THERMAL | _HW_POWER_BRAKE
    ),
}
# The name before and after NVIDIA renamed throttling to events (driver 535).
_REASON_CALLS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_MHZ = 1e6
_MILLI = 1e-3


class NvmlPower:
    """One GPU through NVML, which is open. Raises CounterError if it cannot be read."""

    backend = "nvml"

    def __init__(self, calls: NvmlCalls, uuid: str) -> None:
        self._calls = calls
        self._uuid = uuid
        nvml = calls.nvml
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            self.index = int(nvml.nvmlDeviceGetIndex(self._handle))
            self.chip = text(nvml.nvmlDeviceGetName(self._handle))
            self.library_version = text(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError as exc:
            raise CounterError(CounterCode.UNAVAILABLE, f"GPU {uuid}: {said(exc)}") from exc
        self._readings: list[tuple[PowerMetric, Callable[[], float | None]]] = [
            each for each in self._all_readings() if self._checked(each[1]) is not None
        ]
        self._reason_call = self._existing_reason_call()
        reasons = tuple(_EVENT_REASONS) if self._reason_call else ()
        self.metrics = (*(metric for metric, _ in self._readings), *reasons)
        if not self.metrics:
            reason = f"GPU {uuid}: its driver tells neither power nor clocks nor temperature"
            raise CounterError(CounterCode.UNAVAILABLE, reason)

    def _all_readings(self) -> list[tuple[PowerMetric, Callable[[], float | None]]]:
        """The values that one call each reads. Power comes first, closest to the time of the row."""
        nvml, handle, calls = self._calls.nvml, self._handle, self._calls

        def instant() -> float | None:
            value = calls.field(handle, _POWER_INSTANT)
            return None if value is None else value * _MILLI

        def clock(function: Callable[..., int], which: int) -> Callable[[], float | None]:
            return lambda: calls.scaled(_MHZ, function, handle, which)

        def milli(function: Callable[..., int]) -> Callable[[], float | None]:
            return lambda: calls.scaled(_MILLI, function, handle)

        usage = milli(nvml.nvmlDeviceGetPowerUsage)
        if self._checked(instant) is not None:
            power = PowerMetric(name="NVML_FI_DEV_POWER_INSTANT", label=POWER, unit="W"), instant
        else:
            power = PowerMetric(name="nvmlDeviceGetPowerUsage", label=POWER, unit="W"), usage
        return [
            power,
            (
                PowerMetric(
                    name="nvmlDeviceGetTotalEnergyConsumption", label=MEAN_POWER, unit="W", counter=True, costly=True
                ),
                milli(nvml.nvmlDeviceGetTotalEnergyConsumption),
            ),
            (
                PowerMetric(name="nvmlDeviceGetEnforcedPowerLimit", label=POWER_LIMIT, unit="W"),
                milli(nvml.nvmlDeviceGetEnforcedPowerLimit),
            ),
            (
                PowerMetric(name="NVML_CLOCK_SM", label=SM_CLOCK, unit="Hz"),
                clock(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            ),
            (
                PowerMetric(name="nvmlDeviceGetMaxClockInfo", label=MOST_SM_CLOCK, unit="Hz", costly=True),
                clock(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            ),
            (
                PowerMetric(name="NVML_CLOCK_MEM", label=MEMORY_CLOCK, unit="Hz"),
                clock(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            ),
            (
                PowerMetric(name="NVML_TEMPERATURE_GPU", label=TEMPERATURE, unit="°C"),
                lambda: calls.scaled(1, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            ),
        ]

    def read(self, whole: bool = True) -> Sequence[float | None]:
        """The current values; unless `whole`, without the costly ones. Raises CounterError if the GPU is gone."""
        values = [self._checked(reading) if whole or not metric.costly else None for metric, reading in self._readings]
        if self._reason_call:
            reasons = self._reasons(self._reason_call)
            values += [None if reasons is None else float(bool(reasons & bits)) for bits in _EVENT_REASONS.values()]
        return values

    def _existing_reason_call(self) -> str:
        """The function that returns the reasons for lower clocks; empty if there is none."""
        return next((name for name in _REASON_CALLS if self._reasons(name) is not None), "")

    def _reasons(self, call: str) -> int | None:
        function = getattr(self._calls.nvml, call, None)
        return None if function is None else self._checked(lambda: self._calls.maybe(function, self._handle))

    def _checked(self, reading: Callable[[], T]) -> T:
        """Runs a reading. Raises CounterError if the GPU is gone."""
        try:
            return reading()
        except (GpuLost, LibraryError) as exc:
            raise CounterError(CounterCode.FAILED, f"GPU {self._uuid}: {exc}") from exc


def open_nvml(module: Any = None) -> NvmlCalls:
    """Loads NVML. Raises CounterError."""
    calls = NvmlCalls(module)
    try:
        calls.open()
    except LibraryError as exc:
        code = CounterCode.UNAVAILABLE if exc.state is LibraryState.ABSENT else CounterCode.FAILED
        raise CounterError(code, exc.detail) from exc
    return calls
