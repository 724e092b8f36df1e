"""The backend of Intel's GPUs: the metric streamer of Level Zero's tools.

The metric groups of a GPU are queried once: a Data Center GPU Max has thousands of metrics.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from kineto_trace.base.array_types import Floats, Floats32, Structs

from kinetod.counters.interface import (
    SETS,
    CounterCode,
    CounterDevice,
    CounterError,
    CounterMetric,
    CounterPlan,
    LeftOutMetric,
    WantedCounters,
    checked_wanted,
)
from kinetod.counters.level_zero_library import (
    ClockReading,
    GroupMetric,
    IntelGpu,
    LevelZeroFailure,
    MetricGroup,
    MetricStream,
    ToolsLibrary,
    stream_holder,
)
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, Failure, NativeLibraryError, RingWriter
from kinetod.gpus.intel import INSTALL as INSTALL_LOADER
from kinetod.gpus.level_zero import LOST
from kinetod.processes.drm_gpus import INTEGRATED, PROC, SYS, drm_gpus
from kinetod.processes.identity import text_of

NOT_PERMITTED = 0x70010000
NOT_AVAILABLE = 0x70010001
DEPENDENCY_UNAVAILABLE = 0x70020000
UNSUPPORTED_VERSION, UNSUPPORTED_FEATURE = 0x78000002, 0x78000003
IN_USE = 0x78000006
UNKNOWN = 0x7FFFFFFE
# 1: only for CAP_PERFMON or CAP_SYS_ADMIN (perfmon_capable in the kernel).
RESTRICTIONS = {"i915": "sys/dev/i915/perf_stream_paranoid", "xe": "sys/dev/xe/observation_paranoid"}
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
INSTALL = (
    "install Intel's driver libze_intel_gpu.so.1 and its libraries libigdmd.so.1 (metrics discovery) and libigdml.so.1 "
    "(metrics library), and let kinetod-counters' user open /dev/dri/renderD* (group render)"
)
POLL_S = 0.05
_LEAST_REPORTS, _MOST_REPORTS = 256, 8192  # per read; context switches add reports to the timer's
_POLLS_IN_BUFFER = 8
_READS_AT_ONCE = 64
UINT32, UINT64, FLOAT32, FLOAT64, BOOL8, STRING, UINT8, UINT16 = range(8)  # zet_value_type_t
SLACK_NS = 100e6  # between two readings of a clock
_WHOLE_BITS = {UINT32: 32, UINT64: 64, BOOL8: 8, UINT8: 8, UINT16: 16}
LENGTH, END = "GpuTime", "QueryBeginTime"  # of a sample, in ns; see level_zero_backend.py
EVENT, EVENT_WITH_RANGE, THROUGHPUT, TIMESTAMP = 1, 2, 3, 4  # zet_metric_type_t
_STRING = 5  # zet_value_type_t
_NO_COUNTS = frozenset(("percent", "%", "ns", "us", "ms", "Hz", "MHz", "GBpS", "MBpS", ""))
_UNITS = {"percent": "%", "bytes": "B", "cycles": "cycle", "events": "event", "messages": "message",
          "threads": "thread"}  # fmt: skip
_MEGA = 1e6


# Maps kinetod's labels to Intel's metrics and chooses the metric group to measure. Pure.
#
# The hardware measures one group of metrics at a time. Which metrics a group has depends on the chip: Arc A and
# earlier, Data Center GPU Max, and Arc B have different names for the same. A label has several formulas; the first
# whose metrics are all in the group counts. A label is only given to a metric that means the same as NVIDIA's metric
# with that label (interface.py); Intel has no metric for memory bandwidth in per cent of its peak, nor for bytes over
# PCIe.
# Evidence: the descriptions in Intel's metrics-discovery (docs/metric_info_*.tsv).
# "SM busy": NVIDIA counts the time with a warp resident. XVE_ACTIVE counts the time in which a pipe of a vector engine
# works, XVE_STALL that in which threads are loaded and none does: together the time with a thread resident.
# "Occupancy": NVIDIA's covers the time in which warps are resident, XVE_THREADS_OCCUPANCY_ALL all time.
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFormula:
    """Computes factor * sum of `terms` / sum of `per`. rate: also divides by the sample's seconds."""

    label: str
    unit: str
    terms: tuple[str, ...]
    per: tuple[str, ...] = ()
    factor: float = 1.0
    rate: bool = False

    @property
    def name(self) -> str:
        """The vendor's names, as in "XVE_ACTIVE+XVE_STALL"."""
        return "/".join("+".join(names) for names in (self.terms, self.per) if names)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The plan: formulas over the metrics of one group, in the order of plan.metrics."""

    group: MetricGroup
    formulas: tuple[MetricFormula, ...]
    plan: CounterPlan


_RESIDENT = (("XVE_ACTIVE", "XVE_STALL"), ("XveActive", "XveStall"), ("EuActive", "EuStall"))
_SLOTS = ("XVE_THREADS_OCCUPANCY_ALL", "XveThreadOccupancy", "EuThreadOccupancy")
FORMULAS: Mapping[str, Sequence[MetricFormula]] = {
    formulas[0].label: formulas
    for formulas in (
        [MetricFormula(label="GPU busy", unit="%", terms=(name,)) for name in ("GPU_BUSY", "GpuBusy")],
        [MetricFormula(label="SM busy", unit="%", terms=terms) for terms in _RESIDENT],
        [MetricFormula(label="Tensor pipe", unit="%", terms=("XVE_INST_EXECUTED_XMX_ALL_UTILIZATION",))],
        [
            MetricFormula(label="Occupancy", unit="%", terms=(slots,), per=resident, factor=100.0)
            for slots, resident in zip(_SLOTS, _RESIDENT, strict=True)
        ],
        [MetricFormula(label="DRAM bytes read", unit="B/s", terms=("GPU_MEMORY_BYTE_READ",), rate=True)],
        [MetricFormula(label="DRAM bytes written", unit="B/s", terms=("GPU_MEMORY_BYTE_WRITE",), rate=True)],
        [MetricFormula(label="GPC clock", unit="Hz", terms=("AvgGpuCoreFrequencyMHz",), factor=_MEGA)],
    )
}
# Memory in bytes instead of per cent; otherwise the labels of metric_sets.SETS that Intel has.
INTEL_SETS: Mapping[str, Sequence[str]] = {
    "overview": (
        "GPU busy", "SM busy", "Tensor pipe", "Occupancy", "DRAM bytes read", "DRAM bytes written", "GPC clock",
    ),
    "memory": ("DRAM bytes read", "DRAM bytes written", "GPU busy", "SM busy"),
    "tensor": (
        "Tensor pipe", "SM busy", "Occupancy", "GPU busy", "DRAM bytes read", "DRAM bytes written", "GPC clock",
    ),
    "interconnect": (),
}  # fmt: skip


def usable(groups: Iterable[MetricGroup]) -> list[MetricGroup]:
    """The groups whose samples have a time. Others, such as stalled instructions, are not samples over time."""
    return [group for group in groups if {LENGTH, END} <= {metric.name for metric in group.metrics}]


def offered(groups: Iterable[MetricGroup]) -> list[str]:
    """The names of all metrics, as Group.Metric."""
    return [f"{group.name}.{metric.name}" for group in groups for metric in group.metrics if _is_number(metric)]


def planned_set(gpu: str, groups: Sequence[MetricGroup], set_name: str) -> GroupPlan:
    """Chooses the group with most labels of a set, the driver's first among equals. gpu: its name for messages."""
    labels = INTEL_SETS[set_name]
    best = max(groups, key=lambda group: len(_of_labels(group, labels)), default=None)
    known = {} if best is None else _of_labels(best, labels)
    if best is None or not known:
        reason = (
            f"{gpu} has no metric of the set {set_name}; name individual metrics (`kinetoctl counters list --metrics`)"
        )
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    left_out = [_left_out(gpu, groups, label) for label in labels if label not in known]
    vocabulary = dict.fromkeys(metric.label for metric in SETS[set_name])
    left_out += [
        LeftOutMetric(name=label, why="Intel's metric groups have no equivalent")
        for label in vocabulary
        if label not in FORMULAS
    ]
    return _plan(best, [(formula.name, formula) for formula in known.values()], left_out)


def planned_metrics(gpu: str, groups: Sequence[MetricGroup], names: Sequence[str]) -> GroupPlan:
    """Plans all of these, each a metric's name or Group.Metric. Raises CounterError if no group has them all."""
    having = [{group.name: metric for group in groups if (metric := _named(group, name))} for name in names]
    for name, found in zip(names, having, strict=True):
        if not found:
            reason = f"{gpu} has no metric {name!r}; `kinetoctl counters list --metrics` lists all"
            raise CounterError(CounterCode.INVALID_METRIC, reason)
    for group in groups:
        if all(group.name in found for found in having):
            pairs = [(name, _formula(name, found[group.name])) for name, found in zip(names, having, strict=True)]
            return _plan(group, pairs, [])
    where = "; ".join(f"{name} is in {', '.join(list(found)[:4])}" for name, found in zip(names, having, strict=True))
    reason = f"no group has all of these metrics, and only one can be measured at a time ({where}); name fewer"
    raise CounterError(CounterCode.INVALID_METRIC, f"{gpu}: {reason}")


def _plan(
    group: MetricGroup, pairs: Sequence[tuple[str, MetricFormula]], left_out: Sequence[LeftOutMetric]
) -> GroupPlan:
    metrics = tuple(CounterMetric(name=name, label=formula.label, unit=formula.unit) for name, formula in pairs)
    return GroupPlan(
        group=group,
        formulas=tuple(formula for _, formula in pairs),
        plan=CounterPlan(metrics=metrics, left_out=tuple(left_out)),
    )


def _of_labels(group: MetricGroup, labels: Sequence[str]) -> dict[str, MetricFormula]:
    names = {metric.name for metric in group.metrics}
    found = {}
    for label in labels:
        fitting = [formula for formula in FORMULAS[label] if names.issuperset((*formula.terms, *formula.per))]
        if fitting:
            found[label] = fitting[0]
    return found


def _left_out(gpu: str, groups: Sequence[MetricGroup], label: str) -> LeftOutMetric:
    for group in groups:
        if formula := _of_labels(group, (label,)).get(label):
            return LeftOutMetric(
                name=formula.name, why=f"it is in {group.name}, and only one group is measured at a time"
            )
    return LeftOutMetric(name=FORMULAS[label][0].name, why=f"{gpu} does not have it")


def _named(group: MetricGroup, name: str) -> GroupMetric | None:
    wanted = name.removeprefix(f"{group.name}.")
    return next((metric for metric in group.metrics if metric.name == wanted and _is_number(metric)), None)


def _is_number(metric: GroupMetric) -> bool:
    return metric.type != TIMESTAMP and metric.value_type != _STRING


def _formula(name: str, metric: GroupMetric) -> MetricFormula:
    for formulas in FORMULAS.values():
        for formula in formulas:
            if formula.terms == (metric.name,) and not formula.per:
                return formula
    unit = _UNITS.get(metric.unit, metric.unit)
    if metric.type not in (EVENT, EVENT_WITH_RANGE, THROUGHPUT) or metric.unit in _NO_COUNTS:
        return MetricFormula(label=name, unit=unit, terms=(metric.name,))
    return MetricFormula(label=name, unit="Hz" if unit == "cycle" else f"{unit}/s", terms=(metric.name,), rate=True)


# One Intel GPU that is being sampled: reads its stream every POLL_S, in the thread that runs it.
#
# The hardware's buffer is sized to hold the reports of many reads. The driver's calls release the interpreter lock.
class LevelZeroSampling:
    """Implements interface.Sampling."""

    def __init__(
        self,
        tools: ToolsLibrary,
        gpu: IntelGpu,
        planned: GroupPlan,
        interval_ns: int,
        ring: RingWriter,
        on_kept: Callable[[], None],
    ) -> None:
        """Starts sampling. on_kept: called if the driver does not release the counters. Raises LevelZeroFailure."""
        self._on_kept = on_kept
        self.plan: CounterPlan = planned.plan
        self._tools = tools
        self._gpu = gpu
        self._ring = ring
        reports = int(_POLLS_IN_BUFFER * POLL_S * 1e9 / interval_ns)
        opened = tools.clock(gpu)
        group = planned.group
        wraps = [each for each in (gpu.wrap_ns, group.wrap_ns) if each]
        self._stream: MetricStream | None = tools.open(
            gpu, group, interval_ns, min(max(reports, _LEAST_REPORTS), _MOST_REPORTS)
        )
        self._reader = ReportReader(planned, self._stream.period_ns, min(wraps), opened)

    def run(self) -> None:
        """Reads until the end."""
        end, failure = STOPPED, None
        due = time.monotonic() + self._ring.most_ns / 1e9
        try:
            while not self._ring.wait(min(POLL_S, max(0.0, due - time.monotonic()))):
                if time.monotonic() >= due:
                    end = TOO_LONG
                    break
                self._take()
            self._take()
            self._end()
        except LevelZeroFailure as exc:
            end, failure = ERROR, _failure(exc.function, str(exc), exc.code)
        except OtherClockError:
            end, failure = (
                ERROR,
                _failure("zetMetricStreamerReadData", "the samples' timestamps come from another clock"),
            )
        except Exception as exc:  # noqa: BLE001  # whatever it is ends this sampling, which the ring tells
            end, failure = ERROR, _failure("kinetod", f"{type(exc).__name__}: {exc}")
        self.close()
        self._ring.end(end, failure)

    def _take(self) -> None:
        """Reads all available reports."""
        assert self._stream is not None
        for _ in range(_READS_AT_ONCE):
            values, more = self._stream.read()
            for found in self._reader.rows(values, self._tools.clock(self._gpu)):
                if isinstance(found, SampleGap):
                    self._ring.note_gap(found.lost_ns)
                else:
                    self._ring.put(found.start_ns, found.end_ns, found.values)
            if not more:
                return

    def _end(self) -> None:
        """Raises LevelZeroFailure if the counters are still held, which only the end of the process can change."""
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.close()
            except LevelZeroFailure:
                self._on_kept()
                raise

    def close(self) -> None:
        """Releases the counters."""
        with contextlib.suppress(LevelZeroFailure):
            self._end()


def _failure(call: str, text: str, result: int = 0) -> Failure:
    return Failure(kind=0, result=result, call=call.encode()[:60], text=text.encode()[:400])


class LevelZeroBackend:
    """Implements interface.CounterBackend. library: path of a libze_loader.so.1; empty: the system's."""

    name = "level-zero"

    def __init__(self, library: str = "", *, proc: Path = PROC, sys: Path = SYS) -> None:
        self._library = library
        self._proc = proc
        self._sys = sys
        self._lock = threading.Lock()
        self._tools: ToolsLibrary | None = None
        self._gpus: dict[str, IntelGpu] = {}
        self._groups: dict[str, list[MetricGroup]] = {}
        self.serves_once = (
            False  # true once the driver has failed to close a stream: the process then holds the counters
        )

    @property
    def library_version(self) -> str:
        """The version of the driver's interface, after `open`."""
        return "" if self._tools is None else self._tools.version

    def open(self) -> None:
        """Loads the loader, and through it the driver."""
        with self._lock:
            if self._tools is None:
                try:
                    self._tools = ToolsLibrary(self._library)
                except OSError as exc:
                    reason = f"{INSTALL_LOADER} ({exc})" if not self._library else f"{self._library}: {exc}"
                    raise CounterError(CounterCode.UNAVAILABLE, reason) from exc
                except LevelZeroFailure as exc:
                    raise not_started(exc, self._proc) from exc

    def _opened(self) -> ToolsLibrary:
        self.open()
        assert self._tools is not None
        return self._tools

    def devices(self) -> list[CounterDevice]:
        """Every Intel GPU. An integrated one counts only if there is no other, as elsewhere in kinetod."""
        try:
            gpus = self._opened().gpus()
        except LevelZeroFailure as exc:
            raise translated(exc, proc=self._proc) from exc
        known = {gpu.pci_bus_id: gpu for gpu in drm_gpus(self._sys, self._proc)}
        counted = [
            gpu for gpu in gpus if not known or gpu.pci_bus_id in known or not gpu.pci_bus_id.endswith(INTEGRATED)
        ]
        with self._lock:
            self._gpus = {gpu.uuid: gpu for gpu in counted}
        found = []
        for place, gpu in enumerate(counted):
            drm = known.get(gpu.pci_bus_id)
            drivers = [drm.driver] if drm is not None else list(RESTRICTIONS)
            code, problem = self._problem(gpu, drivers) or ("", "")
            found.append(
                CounterDevice(
                    uuid=gpu.uuid,
                    index=drm.number if drm is not None else place,
                    name=gpu.name,
                    chip=f"8086:{gpu.device_id:04x}",
                    pci_bus_id=gpu.pci_bus_id,
                    code=code,
                    problem=problem,
                )
            )
        return found

    def _problem(self, gpu: IntelGpu, drivers: list[str]) -> tuple[CounterCode, str] | None:
        """Why this GPU cannot be measured, as far as is known without trying."""
        if gpu.tiles > 1:
            reason = f"it has {gpu.tiles} tiles, whose counters are reported separately and at different times"
            return CounterCode.UNAVAILABLE, reason
        if reason := rights_problem(drivers, self._proc):
            return CounterCode.NOT_PERMITTED, reason
        try:
            if not self._groups_of(gpu):
                return CounterCode.UNAVAILABLE, f"the driver provides no metrics for this GPU; {INSTALL}"
        except CounterError as exc:
            return exc.code, exc.reason
        return None

    def _groups_of(self, gpu: IntelGpu) -> list[MetricGroup]:
        """Raises CounterError."""
        with self._lock:
            if not self._groups.get(gpu.uuid):
                assert self._tools is not None
                try:
                    self._groups[gpu.uuid] = usable(self._tools.groups(gpu))
                except LevelZeroFailure as exc:
                    raise translated(exc, proc=self._proc) from exc
            return self._groups[gpu.uuid]

    def _gpu(self, uuid: str) -> IntelGpu:
        """Raises CounterError."""
        devices = {gpu.uuid: gpu for gpu in self.devices()}
        if (device := devices.get(uuid)) is None:
            reason = f"there is no GPU {uuid}; `kinetoctl counters list` lists those that can be measured"
            raise CounterError(CounterCode.UNAVAILABLE, reason)
        if device.problem:
            raise CounterError(CounterCode(device.code), f"GPU {uuid}: {device.problem}")
        return self._gpus[uuid]

    def base_metrics(self, uuid: str) -> list[str]:
        """All metrics, as Group.Metric."""
        return offered(self._groups_of(self._gpu(uuid)))

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """The metrics that one group has."""
        return self._planned(self._gpu(uuid), wanted).plan

    def _planned(self, gpu: IntelGpu, wanted: WantedCounters) -> GroupPlan:
        checked_wanted(wanted, tuple(INTEL_SETS))
        groups = self._groups_of(gpu)
        if wanted.set_name:
            return planned_set(gpu.name, groups, wanted.set_name)
        return planned_metrics(gpu.name, groups, wanted.metrics)

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> LevelZeroSampling:
        """Starts the sampling."""
        gpu = self._gpu(uuid)
        planned = self._planned(gpu, wanted)
        try:
            ring = make_ring(len(planned.formulas))
            return LevelZeroSampling(self._opened(), gpu, planned, interval_ns, ring, self._kept)
        except (OSError, NativeLibraryError) as exc:
            raise CounterError(CounterCode.FAILED, f"GPU {uuid}: {exc}") from exc
        except LevelZeroFailure as exc:
            raise translated(exc, uuid, self._proc) from exc

    def _kept(self) -> None:
        self.serves_once = True


# Translates Level Zero's results into codes and advice for users of counters; the only place that does.
#
# The numbers are ze_result_t of ze_api.h. Intel's driver returns ERROR_UNKNOWN whenever the kernel refuses to open a
# stream, whether another process has one (EBUSY) or this one lacks permission (EACCES). So permissions are checked
# first, as the kernel does: a sysctl, and this process's capabilities.
def translated(failure: LevelZeroFailure, gpu: str = "", proc: Path = PROC) -> CounterError:
    """Error for a failed call. A GPU that somebody else measures is BUSY without the holder."""
    of = f"GPU {gpu}: " if gpu else ""
    if failure.code in LOST:
        return CounterError(
            CounterCode.UNAVAILABLE, f"{of}the driver has lost the GPU ({failure}); see the kernel's log"
        )
    if failure.code == NOT_PERMITTED:
        return CounterError(CounterCode.NOT_PERMITTED, f"{of}{rights_problem(RESTRICTIONS, proc) or _advice()}")
    if failure.function == "zetMetricStreamerOpen":
        if failure.code == IN_USE:
            reason = "the driver did not close an earlier stream of kinetod-counters; restart kinetod-counters"
            return CounterError(CounterCode.FAILED, of + reason)
        if failure.code == NOT_AVAILABLE or (failure.code == UNKNOWN and stream_holder(proc)):
            return CounterError(CounterCode.BUSY, f"{of}another process is using its counters")
        if failure.code == UNKNOWN:
            reason = (
                "the driver cannot open its counters and gives no reason; if another process is using them, end it "
                "(`sudo ls -l /proc/*/fd` shows which one has i915_perf or xe_oa open)"
            )
            return CounterError(CounterCode.FAILED, f"{of}{reason}")
    if failure.code in (DEPENDENCY_UNAVAILABLE, UNSUPPORTED_FEATURE, UNSUPPORTED_VERSION):
        return CounterError(CounterCode.UNAVAILABLE, f"{of}the driver provides no metrics ({failure}); {INSTALL}")
    return CounterError(CounterCode.FAILED, f"{of}{failure}")


def not_started(failure: LevelZeroFailure, proc: Path = PROC) -> CounterError:
    """Error if zeInit fails with metrics enabled, as older drivers do where metrics are unavailable."""
    if reason := rights_problem(RESTRICTIONS, proc):
        return CounterError(CounterCode.NOT_PERMITTED, reason)
    reason = f"Level Zero does not start with metrics enabled ({failure}); {INSTALL}"
    return CounterError(CounterCode.UNAVAILABLE, reason)


def rights_problem(drivers: Iterable[str], proc: Path = PROC) -> str:
    """Why the kernel refuses, and how to change that; empty if it does not. drivers: "i915" or "xe", or both."""
    restricted = [RESTRICTIONS[each] for each in drivers if text_of(proc / RESTRICTIONS[each]).strip() not in ("", "0")]
    if not restricted or _may_anyway(proc):
        return ""
    return f"the kernel restricts counters to administrators (/proc/{restricted[0]} is not 0); {_advice(restricted[0])}"


def _advice(file: str = RESTRICTIONS["i915"]) -> str:
    setting = file.removeprefix("sys/").replace("/", ".")
    return (
        f"enable the drop-in of kinetod-counters.service that adds CAP_PERFMON, or set sysctl {setting}=0 for all users"
    )


def _may_anyway(proc: Path) -> bool:
    for line in text_of(proc / "self/status").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.partition(":")[2], 16)
            return bool(effective >> _CAP_PERFMON & 1 or effective >> _CAP_SYS_ADMIN & 1)
    return False


# Converts a stream's reports to rows with numbers and Unix time. Pure.
#
# A report covers the time since the previous report. Its GpuTime is the length of that time, and its QueryBeginTime,
# contrary to its name, is its end: the driver reads it from the later one of the two raw reports (metrics-discovery,
# md_calculation.cpp, ProcessCalculation). Reports come with each tick of the timer and, besides, when the GPU switches
# between contexts; so samples may be shorter than the interval, and their times abut.
#
# QueryBeginTime is the GPU's timestamp in ns, and begins anew when its counter wraps, which is after minutes on some
# chips. So it is compared with a reading of the same clock that is at most some seconds away, modulo the wrap. All
# wraps of a GPU are powers of two of its ticks, and its clocks' frequencies differ by a power of two, so the shortest
# wrap works for all. Only the GPU's clock decides whether samples abut: its readings against Unix time differ by
# microseconds.
#
# If a report is missing, the next one covers a longer time, in which its counters may have wrapped; so it is left out,
# and its time counts as lost, like a gap between two samples. The driver's own notice of dropped reports is not
# counted: it comes before or after the gap.
class OtherClockError(Exception):
    """The samples' times do not come from the GPU's clock."""


class SampleRow(NamedTuple):
    """A sample in Unix time."""

    start_ns: int
    end_ns: int
    values: Floats32


class SampleGap(NamedTuple):
    """A place where samples are missing."""

    lost_ns: int


def numbers(values: Structs) -> Floats:
    """Of one metric, whose values all have the same type; NaN for what is no number."""
    kind, bits = int(values["type"][0]), np.ascontiguousarray(values["bits"])
    if kind == FLOAT32:
        return bits.astype("<u4").view("<f4").astype(np.float64)
    if kind == FLOAT64:
        return bits.view("<f8").copy()
    if kind not in _WHOLE_BITS:
        return np.full(len(values), np.nan)
    mask = np.uint64((1 << _WHOLE_BITS[kind]) - 1)
    return (bits & mask).astype(np.float64)


class ReportReader:
    """Makes rows from the values of one stream.

    period_ns: the hardware's interval; wrap_ns: of the shortest of its clocks; opened: reading from before the stream
    was opened.
    """

    def __init__(self, planned: GroupPlan, period_ns: int, wrap_ns: float, opened: ClockReading) -> None:
        self._formulas = planned.formulas
        used = {LENGTH, END, *(name for formula in self._formulas for name in (*formula.terms, *formula.per))}
        self._places = {metric.name: place for place, metric in enumerate(planned.group.metrics) if metric.name in used}
        self._period_ns = period_ns
        self._wrap_ns = wrap_ns
        self._opened = opened
        self._latest_ns = 0  # end of the previous sample in Unix time; 0: there was none
        self._latest_gpu_ns = 0.0

    def rows(self, values: Structs, clock: ClockReading) -> Iterator[SampleRow | SampleGap]:
        """The rows and gaps in the order of time. clock: read after the values.

        The very first report is left out: it may cover time before the stream was opened. Raises OtherClockError.
        """
        if not len(values):
            return
        columns = {name: numbers(values[:, place]) for name, place in self._places.items()}
        lengths, ends, apart = columns[LENGTH], columns[END], self._apart(columns[END], clock)
        figures = np.stack([_figure(formula, columns) for formula in self._formulas], axis=1).astype(np.float32)
        for row in np.flatnonzero(lengths > 0):
            end_ns, passed_ns = clock.unix_ns + round(apart[row]), (ends[row] - self._latest_gpu_ns) % self._wrap_ns
            if self._latest_ns:
                if passed_ns > self._wrap_ns / 2:  # it ended before the previous sample
                    continue
                yield from self._sample(end_ns, passed_ns, lengths[row], figures[row])
            self._latest_ns = max(self._latest_ns, end_ns)
            self._latest_gpu_ns = ends[row]

    def _apart(self, ends: Floats, clock: ClockReading) -> Floats:
        """How long after the clock reading each sample ended."""
        half = self._wrap_ns / 2
        apart: Floats = (ends - clock.gpu_ns + half) % self._wrap_ns - half
        before_opened = apart[-1] < self._opened.unix_ns - clock.unix_ns - SLACK_NS
        if apart[-1] > SLACK_NS or (before_opened and not self._latest_ns):
            raise OtherClockError
        return apart

    def _sample(
        self, end_ns: int, passed_ns: float, length_ns: float, figures: Floats32
    ) -> Iterator[SampleRow | SampleGap]:
        """passed_ns: from the end of the previous sample to the end of this one, by the GPU's clock."""
        near_ns, start_ns = self._period_ns / 2, self._latest_ns
        if (
            length_ns > self._period_ns + near_ns or end_ns <= start_ns
        ):  # reports are missing, or Unix time stepped back
            yield SampleGap(round(passed_ns))
            return
        if passed_ns - length_ns >= near_ns:
            yield SampleGap(round(passed_ns - length_ns))
            start_ns = max(start_ns, end_ns - round(length_ns))
        yield SampleRow(start_ns, end_ns, figures)


def _figure(formula: MetricFormula, columns: dict[str, Floats]) -> Floats:
    figure = formula.factor * _sum(columns, formula.terms)
    with np.errstate(divide="ignore", invalid="ignore"):
        if formula.per:
            per = _sum(columns, formula.per)
            figure = np.where(per > 0, figure / per, np.nan)
        if formula.rate:
            figure = figure / (columns[LENGTH] / 1e9)
    return figure


def _sum(columns: dict[str, Floats], names: Sequence[str]) -> Floats:
    total: Floats = np.sum([columns[name] for name in names], axis=0)
    return total
