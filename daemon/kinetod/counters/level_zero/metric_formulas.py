"""What kinetod's labels are in Intel's metrics, and which group of metrics is measured. Pure.

Theory of operation
    The hardware measures one group of metrics at a time. Which metrics a group has depends on the chip: Arc A and
    earlier, Data Center GPU Max, and Arc B have different names for the same. A label has formulas, the first of which
    that a group has all metrics of counts. A label is only given to what means the same as NVIDIA's metric of that
    label (metric_sets.py); of the vocabulary, Intel's metrics have no use of the memory in per cent of its peak, and no
    bytes over PCIe. Evidence: the descriptions in Intel's metrics-discovery (docs/metric_info_*.tsv).

    "SM busy": NVIDIA counts the time with a warp resident. XVE_ACTIVE counts the time in which a pipe of a vector
    engine works, XVE_STALL that in which threads are loaded and none does: together the time with a thread resident.
    "Occupancy": NVIDIA's is of the time in which warps are resident, XVE_THREADS_OCCUPANCY_ALL of all time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kinetod.counters.interface import CounterCode, CounterError, CounterMetric, CounterPlan, LeftOutMetric
from kinetod.counters.level_zero.tools_library import GroupMetric, MetricGroup
from kinetod.counters.metric_sets import SETS

LENGTH, END = "GpuTime", "QueryBeginTime"  # of a sample, in ns; see report_values.py
EVENT, EVENT_WITH_RANGE, THROUGHPUT, TIMESTAMP = 1, 2, 3, 4  # zet_metric_type_t
_STRING = 5  # zet_value_type_t
_NO_COUNTS = frozenset(("percent", "%", "ns", "us", "ms", "Hz", "MHz", "GBpS", "MBpS", ""))
_UNITS = {"percent": "%", "bytes": "B", "cycles": "cycle", "events": "event", "messages": "message",
          "threads": "thread"}  # fmt: skip
_MEGA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFormula:
    """factor * sum of `terms`, over the sum of `per`; rate: and over the sample's seconds."""

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
    """What is measured: formulas over the metrics of one group, in the order of plan.metrics."""

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
# Instead of the use of the memory in per cent, the bytes; otherwise the labels of metric_sets.SETS that there are.
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
    """The groups whose samples have a time. Others, such as those of stalled instructions, are no samples over time."""
    return [group for group in groups if {LENGTH, END} <= {metric.name for metric in group.metrics}]


def offered(groups: Iterable[MetricGroup]) -> list[str]:
    """The names of all metrics, as Group.Metric."""
    return [f"{group.name}.{metric.name}" for group in groups for metric in group.metrics if _is_number(metric)]


def planned_set(gpu: str, groups: Sequence[MetricGroup], set_name: str) -> GroupPlan:
    """The group that has most labels of a set, the driver's first one among equals. gpu: its name for texts.

    Raises CounterError.
    """
    labels = INTEL_SETS[set_name]
    best = max(groups, key=lambda group: len(_of_labels(group, labels)), default=None)
    known = {} if best is None else _of_labels(best, labels)
    if best is None or not known:
        reason = f"{gpu} has no metric of the set {set_name}; name metrics: `kinetoctl counters list --metrics` has all"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    left_out = [_left_out(gpu, groups, label) for label in labels if label not in known]
    vocabulary = dict.fromkeys(metric.label for metric in SETS[set_name])
    left_out += [
        LeftOutMetric(name=label, why="Intel's groups have no metric of this meaning")
        for label in vocabulary
        if label not in FORMULAS
    ]
    return _plan(best, [(formula.name, formula) for formula in known.values()], left_out)


def planned_metrics(gpu: str, groups: Sequence[MetricGroup], names: Sequence[str]) -> GroupPlan:
    """All of these, each a metric's name or Group.Metric. Raises CounterError if no group has them all."""
    having = [{group.name: metric for group in groups if (metric := _named(group, name))} for name in names]
    for name, found in zip(names, having, strict=True):
        if not found:
            reason = f"{gpu} has no metric {name!r}; `kinetoctl counters list --metrics` has all"
            raise CounterError(CounterCode.INVALID_METRIC, reason)
    for group in groups:
        if all(group.name in found for found in having):
            pairs = [(name, _formula(name, found[group.name])) for name, found in zip(names, having, strict=True)]
            return _plan(group, pairs, [])
    where = "; ".join(f"{name} is in {', '.join(list(found)[:4])}" for name, found in zip(names, having, strict=True))
    reason = f"these metrics are in no group together, and one group is measured at a time ({where}); name fewer"
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
            return LeftOutMetric(name=formula.name, why=f"it is in {group.name}, and one group is measured at a time")
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
