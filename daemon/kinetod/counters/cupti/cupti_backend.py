"""The backend that every installation has: libcupti through our own C library."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kinetod.counters.cupti.cupti_results import HARDWARE_BUSY, INVALID_METRIC_NAME, UNKNOWN, problem_of_gpu, translated
from kinetod.counters.cupti.library_search import find_libraries
from kinetod.counters.cupti.native_sampling import (
    CUPTI,
    DRIVER_LIBRARY,
    LOADING,
    NativeCupti,
    NativeFailure,
    NativeSession,
    SampledGpu,
)
from kinetod.counters.interface import (
    CounterCode,
    CounterDevice,
    CounterError,
    CounterMetric,
    CounterPlan,
    LeftOutMetric,
    WantedCounters,
    checked_wanted,
)
from kinetod.counters.metric_sets import SETS, described
from kinetod.counters.sample_rings import NativeLibraryError, RingWriter

CUDA = "libcuda.so.1"
# Where the driver has no trigger by time, the interval is in cycles of the system clock, which varies; samples say how
# long they are. GA100: up to 1410 MHz.
_BY_CLOCK_HZ = {"GA100": 1_410_000_000}
_MAY_BE_MISSING = "nvl"  # NVLink's metrics are listed where there is no link, and fail when they are started


class CuptiSampling:
    """A GPU that is being sampled."""

    def __init__(self, session: NativeSession, plan: CounterPlan) -> None:
        self._session = session
        self.plan = plan

    def run(self) -> None:
        """Decodes until the end."""
        self._session.run()

    def close(self) -> None:
        """Gives the counters back."""
        self._session.close()


class CuptiBackend:
    """Implements interface.CounterBackend. library: path of a libcupti; empty: those of library_search, one by one."""

    name = "cupti"
    serves_once = False

    def __init__(
        self,
        library: str = "",
        *,
        cuda: str = CUDA,
        find: Callable[[], Sequence[str]] = find_libraries,
        proc: Path = Path("/proc"),
    ) -> None:
        self._paths = (lambda: [library]) if library else find
        self._cuda = cuda
        self._proc = proc
        self._lock = threading.Lock()
        self._cupti: NativeCupti | None = None
        self._gpus: dict[str, SampledGpu] = {}
        self.library_version = ""

    def open(self) -> None:
        """Loads the first library that works."""
        with self._lock:
            if self._cupti is None:
                os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML and the kernel number them, and all of them
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                self._cupti = self._opened()
                self.library_version = str(self._cupti.version)

    def _opened(self) -> NativeCupti:
        failures: list[str] = []
        for path in self._paths():
            try:
                return NativeCupti(path, self._cuda)
            except NativeLibraryError as exc:
                raise CounterError(CounterCode.FAILED, str(exc)) from exc
            except NativeFailure as exc:
                if exc.kind != LOADING or exc.call == DRIVER_LIBRARY:
                    raise translated(exc) from exc
                failures.append(f"{path}: {exc}")
        tried = "; ".join(failures) or "no libcupti is installed"
        advice = "pip install nvidia-cuda-cupti for the Python of kinetod, or name one (--library)"
        raise CounterError(CounterCode.UNAVAILABLE, f"no libcupti of CUDA 12.8 or later: {tried}; {advice}")

    def _loaded(self) -> NativeCupti:
        self.open()
        assert self._cupti is not None
        return self._cupti

    def devices(self) -> list[CounterDevice]:
        """Every GPU that CUDA sees."""
        cupti = self._loaded()
        try:
            gpus = cupti.gpus()
        except NativeFailure as exc:
            raise translated(exc) from exc
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        return [self._device(gpu) for gpu in gpus]

    def _device(self, gpu: SampledGpu) -> CounterDevice:
        code, problem = problem_of_gpu(gpu, self._proc) or ("", "")
        return CounterDevice(
            uuid=gpu.uuid, index=gpu.index, name=gpu.name, chip=gpu.chip, pci_bus_id=gpu.pci_bus_id, code=code,
            problem=problem,
        )  # fmt: skip

    def _gpu(self, uuid: str) -> SampledGpu:
        if uuid not in self._gpus:
            self.devices()
        if (gpu := self._gpus.get(uuid)) is None:
            reason = f"there is no GPU {uuid}; `kinetoctl counters list` has those that can be measured"
            raise CounterError(CounterCode.UNAVAILABLE, reason)
        if (problem := problem_of_gpu(gpu, self._proc)) is not None:
            raise CounterError(problem[0], f"GPU {uuid}: {problem[1]}")
        return gpu

    def base_metrics(self, uuid: str) -> list[str]:
        """Counters, ratios and throughputs of the chip."""
        cupti = self._loaded()
        gpu = self._gpu(uuid)
        try:
            return cupti.base_metrics(gpu.index)
        except NativeFailure as exc:
            raise translated(exc, uuid) from exc

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """What fits into one pass."""
        checked_wanted(wanted, tuple(SETS))
        cupti = self._loaded()
        gpu = self._gpu(uuid)
        if wanted.set_name:
            return _fitting(cupti, gpu, SETS[wanted.set_name])
        return CounterPlan(metrics=_all_of(cupti, gpu, wanted.metrics))

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> CuptiSampling:
        """Begins to sample."""
        plan = self.plan(uuid, wanted)
        gpu = self._gpu(uuid)
        try:
            return CuptiSampling(self._started(gpu, plan, interval_ns, make_ring), plan)
        except NativeFailure as exc:
            links = [metric for metric in plan.metrics if metric.name.startswith(_MAY_BE_MISSING)]
            if exc.kind != CUPTI or exc.result != UNKNOWN or not wanted.set_name or not links:
                raise translated(exc, uuid, self._proc) from exc
        plan = CounterPlan(
            metrics=tuple(metric for metric in plan.metrics if metric not in links),
            left_out=(*plan.left_out, *(LeftOutMetric(name=each.name, why="it has no NVLink") for each in links)),
        )
        try:
            return CuptiSampling(self._started(gpu, plan, interval_ns, make_ring), plan)
        except NativeFailure as exc:
            raise translated(exc, uuid, self._proc) from exc

    def _started(
        self, gpu: SampledGpu, plan: CounterPlan, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> NativeSession:
        hertz = _BY_CLOCK_HZ.get(gpu.chip, 0)
        names = [metric.name for metric in plan.metrics]
        ring = make_ring(len(names))
        cycles = interval_ns * hertz // 10**9
        return self._loaded().start(gpu.index, names, ring, interval_ns=interval_ns, cycles=cycles)


def _fitting(cupti: NativeCupti, gpu: SampledGpu, wanted: Sequence[CounterMetric]) -> CounterPlan:
    """As many as fit into one pass, in this order, and one of each label. Raises CounterError if none does."""
    known, left_out = list[CounterMetric](), dict[str, LeftOutMetric]()  # the latter by label
    for metric in wanted:
        if any(metric.label == each.label for each in known):
            continue
        try:
            passes = cupti.passes(gpu.index, [each.name for each in (*known, metric)])
        except NativeFailure as exc:
            if exc.kind != CUPTI or exc.result not in (INVALID_METRIC_NAME, UNKNOWN, HARDWARE_BUSY):
                raise translated(exc, gpu.uuid) from exc
            left_out[metric.label] = LeftOutMetric(name=metric.name, why=f"{gpu.chip} does not have it")
            continue
        if passes == 1:
            known.append(metric)
            left_out.pop(metric.label, None)
        else:
            why = f"it needs {passes} passes beside the others" if known else f"it needs {passes} passes"
            left_out[metric.label] = LeftOutMetric(name=metric.name, why=why)
    if not known:
        first = next(iter(left_out.values()))
        reason = f"GPU {gpu.uuid}: {gpu.chip} has no metric of this set: {first.name}: {first.why}"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    return CounterPlan(metrics=tuple(known), left_out=tuple(left_out.values()))


def _all_of(cupti: NativeCupti, gpu: SampledGpu, names: Sequence[str]) -> tuple[CounterMetric, ...]:
    """Raises CounterError if one is unknown, or if they do not fit into one pass."""
    metrics = []
    for name in names:
        try:
            metrics.append(described(name, cupti.dimension(gpu.index, name)))
            alone = cupti.passes(gpu.index, [name])
        except NativeFailure as exc:
            error = translated(exc, gpu.uuid)
            if error.code is not CounterCode.INVALID_METRIC:
                raise error from exc
            reason = f"{gpu.chip} has no metric {name!r}; `kinetoctl counters list --metrics` has all"
            completed = "to be completed by a submetric, such as .avg or .sum.per_second"
            raise CounterError(error.code, f"GPU {gpu.uuid}: {reason}, {completed}") from exc
        if alone != 1:
            reason = f"{name} needs {alone} passes on {gpu.chip}: sampling a running program has one"
            raise CounterError(CounterCode.INVALID_METRIC, f"GPU {gpu.uuid}: {reason}")
    try:
        passes = cupti.passes(gpu.index, names)
    except NativeFailure as exc:
        raise translated(exc, gpu.uuid) from exc
    if passes != 1:
        reason = f"these {len(names)} metrics need {passes} passes together on {gpu.chip}; name fewer"
        raise CounterError(CounterCode.INVALID_METRIC, f"GPU {gpu.uuid}: {reason}")
    return tuple(metrics)
