"""`python -m kinetod.counters.power.power_process`: reads GPUs into files until its standard input ends.

Theory of operation
    The first line of its standard input is a PowerRequest, and each later one a GPU to end; each line of its standard
    output is a PowerNews. Each GPU has its own thread, so that a hanging driver delays no other GPU. The process ends
    when the daemon closes the standard input or dies: the main thread gives the threads JOIN_S.

    No GPU uses more than a share MOST_SHARE of a core: if the driver's calls cost more than usual, there are fewer
    readings, but at least one every MOST_PERIOD_NS.

    Of an NVIDIA GPU, "Power" is the current power (NVML_FI_DEV_POWER_INSTANT, driver 530 and later), otherwise the
    result of nvmlDeviceGetPowerUsage, which from Ampere on (except GA100) is the mean of the last second. On A100 and
    H100 an instant value covers 25 ms in 100 (arXiv 2312.02741), so there is also "Power, mean", from the GPU's own
    energy counter: exact over 100 ms or more; for a single row limited by the counter's resolution.

    The reasons for lower clocks are the current ones. The driver's own power limit counts as power, and so does the
    external power brake; slowdowns by software and hardware as heat; anything the board's hardware does without the
    driver also counts as hardware.
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import msgspec
import numpy as np
from kineto_trace.spool.counter_samples import CounterHeader, SampledMetric, row_type, write_header, write_rows

from kinetod.base.safe_text import clean
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power.interface import (
    BY_HARDWARE,
    BY_HEAT,
    BY_POWER,
    MEAN_POWER,
    MEMORY_CLOCK,
    MOST_ROW_NS,
    MOST_SM_CLOCK,
    POWER,
    POWER_LIMIT,
    SET_NAME,
    SM_CLOCK,
    TEMPERATURE,
    WHOLE_EVERY,
    PowerMetric,
    PowerNews,
    PowerRequest,
    PowerSource,
    PowerTarget,
)
from kinetod.gpus.drm import INTEL_CLOCKS, Sensors, scaled, text
from kinetod.gpus.gpu_types import LibraryError, LibraryState
from kinetod.gpus.nvml import GpuLost, NvmlCalls, nvml_text, said
from kinetod.processes.drm_gpus import PROC, SYS, DrmGpu, drm_gpus

JOIN_S = 1.0
MOST_SHARE = 0.03
MOST_PERIOD_NS = 500_000_000
_SMOOTHING = 0.1
_MICRO = 1e-6  # hwmon's watts and joules
_MILLI = 1e-3  # its degrees
_MEGA = 1e6
# Below the PCI device: xe's of its first tile, and i915's below the DRM device.
_REASON_FOLDERS = ("tile0/gt0/freq0/throttle/reason_", "drm/card*/gt/gt0/throttle_reason_")
_REASONS = {
    BY_POWER: ("pl1", "pl2", "pl4"),
    BY_HEAT: ("thermal", "ratl", "vr_thermalert"),
    BY_HARDWARE: ("prochot", "vr_tdc"),
}
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
            self.chip = nvml_text(nvml.nvmlDeviceGetName(self._handle))
            self.library_version = nvml_text(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError as exc:
            raise CounterError(CounterCode.UNAVAILABLE, f"GPU {uuid}: {said(exc)}") from exc
        self._readings: list[tuple[PowerMetric, Callable[[], float | None]]] = [
            each for each in self._all_readings() if self._checked(each[1]) is not None
        ]
        self._reason_call = self._existing_reason_call()
        reasons = tuple(_EVENT_REASONS) if self._reason_call else ()
        self.metrics = (*(metric for metric, _ in self._readings), *reasons)
        if not self.metrics:
            reason = f"GPU {uuid}: its driver reports neither power nor clocks nor temperature"
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


class PowerRows:
    """Makes rows out of one GPU's readings. Pure."""

    def __init__(self, metrics: Sequence[PowerMetric]) -> None:
        self._layout = row_type(len(metrics))
        self._counters = [at for at, metric in enumerate(metrics) if metric.counter]
        self._costly = [at for at, metric in enumerate(metrics) if metric.costly]
        self._waiting: list[tuple[int, int, list[float]]] = []  # start, end and values, since the last whole reading
        self._before_ns = 0  # time of the last reading, 0: none
        self._known: dict[int, tuple[int, float | None]] = {}  # last reading of each counter

    def add(self, time_ns: int, values: Sequence[float | None], period_ns: int, *, whole: bool) -> None:
        """Adds a reading, whose row ends with it.

        The first reading has no row, nor one whose time is not later. After more than MOST_ROW_NS a row only goes back
        by one period, and counters have no value. Rows since the last whole reading get the costly values of this one,
        if it is whole.
        """
        since_ns, self._before_ns = self._before_ns, time_ns
        if since_ns and time_ns - since_ns > MOST_ROW_NS:
            since_ns = time_ns - period_ns
            self._known.clear()
        made = bool(since_ns) and time_ns > since_ns
        if made:
            self._waiting.append((since_ns, time_ns, [_number(value) for value in values]))
        for at in self._counters:
            if whole or at not in self._costly:
                then_ns, then = self._known.get(at, (time_ns, None))
                self._known[at] = (time_ns, values[at])
                if made or at in self._costly:
                    self._fill(at, _growth(then, values[at], (time_ns - then_ns) / 1e9))
        if whole:
            for at in set(self._costly).difference(self._counters):
                self._fill(at, _number(values[at]))

    def _fill(self, at: int, value: float) -> None:
        rows = self._waiting if at in self._costly else self._waiting[-1:]
        for _, _, values in rows:
            values[at] = value

    def take(self) -> "np.ndarray":
        """Returns the rows not taken yet; call it after a whole reading."""
        taken, self._waiting = self._waiting, []
        rows = np.zeros(len(taken), dtype=self._layout)
        for at, row in enumerate(taken):
            rows[at] = row
        return rows


class ReadingPace:
    """Computes the pause between readings from their cost. Pure."""

    def __init__(self, period_ns: int) -> None:
        self._least_ns = period_ns
        self._cost_ns = 0.0
        self.period_ns = period_ns

    def add(self, cost_ns: int) -> None:
        """Adds the CPU time of one more reading."""
        self._cost_ns += _SMOOTHING * (cost_ns - self._cost_ns)
        self.period_ns = max(self._least_ns, min(int(self._cost_ns / MOST_SHARE), MOST_PERIOD_NS))


class GpuRecorder(threading.Thread):
    """Writes one GPU's readings into its files, which this thread owns. tell: gets code and reason of its news."""

    def __init__(
        self,
        open_source: Callable[[], PowerSource],
        target: PowerTarget,
        request: PowerRequest,
        tell: Callable[[str, str], None],
    ) -> None:
        super().__init__(name=f"power {target.uuid[:12]}", daemon=True)
        self._open_source = open_source
        self._target = target
        self._request = request
        self._tell = tell
        self._left = request.max_bytes
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends it after one more reading."""
        self._stopped.set()

    def run(self) -> None:
        """Runs until it is stopped, the GPU is gone, or the disk is full."""
        try:
            self._record()
        except CounterError as exc:
            self._tell(exc.code, exc.reason)
        except (OSError, ValueError) as exc:
            self._tell(CounterCode.FAILED, f"GPU {self._target.uuid}: {clean(str(exc), 200)}")

    def _record(self) -> None:
        """Raises CounterError, OSError, ValueError."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(os.fdopen(each, "wb")) for each in self._target.descriptors]
            source = self._open_source()
            for file in files:
                write_header(file, _header(source, self._target, self._request.period_ns))
                file.flush()
            self._read_on(source, files)

    def _read_on(self, source: PowerSource, files: Sequence[IO[bytes]]) -> None:
        rows, pace = PowerRows(source.metrics), ReadingPace(self._request.period_ns)
        began, number = time.monotonic(), 0
        rows.add(time.time_ns(), source.read(whole=True), pace.period_ns, whole=True)
        self._tell("", "")  # the first row begins before the daemon reads this
        stopped = False
        try:
            while not stopped:  # the last reading marks the end
                stopped = self._stopped.wait(max(0.0, began + pace.period_ns / 1e9 - time.monotonic()))
                began, cpu_ns, number = time.monotonic(), time.thread_time_ns(), number + 1
                whole = stopped or number % WHOLE_EVERY == 0
                rows.add(time.time_ns(), source.read(whole), pace.period_ns, whole=whole)
                if whole:
                    self._write(rows.take(), files)
                pace.add(time.thread_time_ns() - cpu_ns)
        except CounterError:
            self._write(rows.take(), files)
            raise

    def _write(self, rows: "np.ndarray", files: Sequence[IO[bytes]]) -> None:
        fitting = rows[: self._left // rows.dtype.itemsize]
        self._left -= fitting.nbytes
        for file in files:
            write_rows(file, fitting)
            file.flush()
        if len(fitting) < len(rows):
            raise CounterError(CounterCode.FAILED, "the power readings ended early: their file is full")


class PowerSources:
    """Opens sources. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: NvmlCalls | None = None

    def open(self, target: PowerTarget) -> PowerSource:
        """The source of this GPU. Raises CounterError."""
        if target.pci_bus_id:
            return DrmPower(target.pci_bus_id)
        with self._lock:
            if self._nvml is None:
                self._nvml = open_nvml()
        return NvmlPower(self._nvml, target.uuid)


class NewsPipe:
    """Writes news, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, gpu: int, code: str, reason: str) -> None:
        """Writes one line. It does not matter if the daemon is gone: the standard input has ended, too."""
        line = msgspec.json.encode(PowerNews(gpu=gpu, code=code, reason=clean(reason, 300))) + b"\n"
        with self._lock, contextlib.suppress(OSError):
            os.write(1, line)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _growth(then: float | None, now: float | None, seconds: float) -> float:
    """Growth per second; NaN if one of the values is missing, or the counter was reset."""
    return math.nan if then is None or now is None or now < then or seconds <= 0 else (now - then) / seconds


def _header(source: PowerSource, target: PowerTarget, period_ns: int) -> CounterHeader:
    return CounterHeader(
        gpu_uuid=target.uuid,
        gpu_index=source.index,
        chip=source.chip,
        interval_ns=period_ns,
        metrics=tuple(SampledMetric(name=each.name, label=each.label, unit=each.unit) for each in source.metrics),
        set=SET_NAME,
        backend=source.backend,
        library_version=source.library_version,
    )


def _serve(recorders: Sequence[GpuRecorder], within_s: float) -> bool:
    """Ends single GPUs when the daemon asks for it. Returns whether the standard input has ended within that time."""
    deadline = time.monotonic() + within_s
    said = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([0], [], [], left_s)[0]:
            continue
        part = os.read(0, 4096)
        if not part:
            return True
        *lines, said = (said + part).split(b"\n")
        for line in lines:
            recorders[int(line)].stop()
    return False


def main() -> NoReturn:
    """Serves one request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # so that no byte of a later line is read
        request = msgspec.json.decode(stdin.readline(), type=PowerRequest)
    sources, news = PowerSources(), NewsPipe()
    recorders = [
        GpuRecorder(partial(sources.open, target), target, request, partial(news.tell, place))
        for place, target in enumerate(request.gpus)
    ]
    for each in recorders:
        each.start()
    if not _serve(recorders, request.most_ns / 1e9):
        for place, each in enumerate(recorders):
            if each.is_alive():
                news.tell(place, CounterCode.FAILED, "the power readings ended early: the maximum duration was reached")
    for each in recorders:
        each.stop()
    deadline = time.monotonic() + JOIN_S
    for each in recorders:
        each.join(max(0.0, deadline - time.monotonic()))
    os._exit(0)  # so that a thread in the driver cannot block the exit


if __name__ == "__main__":
    main()


# Power, clocks, temperature and throttling of AMD's and Intel's GPUs, from the files of their kernel drivers. amdgpu
# has files for everything except the reasons for lower clocks; xe and i915 have those, and usually an energy counter
# instead of power; its growth is the power. The existing files are looked up once. A GPU whose folder is gone has
# fallen off the bus.
class DrmPower:
    """One GPU through its kernel driver. Raises CounterError if there is none at this PCI address."""

    def __init__(self, pci_bus_id: str, *, sys: Path = SYS, proc: Path = PROC) -> None:
        gpu = next((each for each in drm_gpus(sys, proc) if each.pci_bus_id == pci_bus_id), None)
        if gpu is None:
            raise CounterError(CounterCode.UNAVAILABLE, f"there is no AMD or Intel GPU at {pci_bus_id}")
        self._gpu = gpu
        self.backend = gpu.driver
        self.library_version = clean(text(proc / "sys/kernel/osrelease"), 128)
        self.index = gpu.number
        self.chip = clean(text(gpu.folder / "product_name") or text(gpu.folder / "device"), 128)
        self._files = _amd_files(gpu) if gpu.vendor == "amd" else _intel_files(gpu)
        self._flags = _reason_files(gpu.folder) if gpu.vendor == "intel" else {}
        self.metrics = (
            *(metric for metric, _, _ in self._files),
            *(PowerMetric(name=paths[0].name, label=label, unit="") for label, paths in self._flags.items()),
        )
        if not self.metrics:
            reason = f"the GPU at {pci_bus_id}: {gpu.driver} has no files for its power, clocks or temperature"
            raise CounterError(CounterCode.UNAVAILABLE, reason)

    def read(self, whole: bool = True) -> Sequence[float | None]:  # none of them is costly
        """The metrics' current values. Raises CounterError if the GPU is gone."""
        values = [scaled(path, factor) for _, path, factor in self._files]
        values += [_flag(paths) for paths in self._flags.values()]
        if all(each is None for each in values) and not self._gpu.folder.exists():
            raise CounterError(CounterCode.FAILED, f"the GPU at {self._gpu.pci_bus_id} has fallen off the bus")
        return values


_File = tuple[PowerMetric, Path, float]


def _amd_files(gpu: DrmGpu) -> list[_File]:
    sensors = Sensors(gpu.folder)
    found = [
        _first(POWER, "W", _MICRO, [sensors.path(name) for name in ("power1_average", "power1_input")]),
        _first(POWER_LIMIT, "W", _MICRO, [sensors.path("power1_cap")]),
        _first(SM_CLOCK, "Hz", 1, [sensors.labelled_path("freq", "sclk")]),
        _first(MEMORY_CLOCK, "Hz", 1, [sensors.labelled_path("freq", "mclk")]),
        _first(TEMPERATURE, "°C", _MILLI, [sensors.labelled_path("temp", label) for label in ("junction", "edge")]),
    ]
    return [each for each in found if each is not None]


def _intel_files(gpu: DrmGpu) -> list[_File]:
    sensors = Sensors(gpu.folder)
    clocks = [path for pattern in INTEL_CLOCKS for path in sorted(gpu.folder.glob(pattern))]
    found = [
        _first(POWER, "W", _MICRO, [sensors.path("power1_input")])
        or _first(POWER, "W", _MICRO, [sensors.path("energy1_input")], counter=True),
        _first(POWER_LIMIT, "W", _MICRO, [sensors.path(name) for name in ("power1_max", "power1_cap")]),
        _first(SM_CLOCK, "Hz", _MEGA, clocks),
        _first(TEMPERATURE, "°C", _MILLI, [sensors.labelled_path("temp", "pkg"), sensors.path("temp1_input")]),
    ]
    return [each for each in found if each is not None]


def _first(
    label: str, unit: str, factor: float, paths: Sequence[Path | None], *, counter: bool = False
) -> _File | None:
    """The first of these files that contains a number."""
    for path in paths:
        if path is not None and scaled(path, factor) is not None:
            return PowerMetric(name=path.name, label=label, unit=unit, counter=counter), path, factor
    return None


def _reason_files(folder: Path) -> dict[str, list[Path]]:
    found = {
        label: [
            path
            for pattern in _REASON_FOLDERS
            for name in names
            for path in sorted(folder.glob(pattern + name))
            if scaled(path, 1) is not None
        ]
        for label, names in _REASONS.items()
    }
    return {label: paths for label, paths in found.items() if paths}


def _flag(paths: Sequence[Path]) -> float | None:
    """1 if one of these files is set; None if none can be read."""
    values = [value for path in paths if (value := scaled(path, 1)) is not None]
    return float(any(values)) if values else None
