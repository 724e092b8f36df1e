"""The interface between kinetod-counters and the vendors' backends: values, errors, and what a backend implements.

Theory of operation
    counter_client.py (in the daemon)     one connection for each GPU; takes the rows, tracks losses
    sampler_server.py (kinetod-counters)  one thread for each GPU; closing the connection ends the sampling
    backends.py, backend_group.py         the list of backends, and several vendors' as one
    a backend                             a folder or file for each: amdgpu, cupti, level_zero, cupti_python.py

    A backend runs in kinetod-counters only, since a driver may hang or crash. `open`, `devices`, `plan` and `start` may
    block for seconds. It holds a GPU's counters from `start` to the end of `run`, and no longer: most GPUs have one set
    of them, so that nobody else can measure at the same time. Counters held by others are never taken away.

    Values belong to the GPU as a whole, with all its processes.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from kinetod.counters.sample_rings import RingWriter

MAX_METRICS = 64
DEFAULT_INTERVAL_NS = 1_000_000
LEAST_INTERVAL_NS = 10_000
MOST_INTERVAL_NS = 1_000_000_000
MOST_DURATION_NS = 24 * 3600 * 10**9


class CounterCode(StrEnum):
    """Why counters are unavailable."""

    BUSY = "COUNTERS_BUSY"  # somebody else measures this GPU
    NOT_PERMITTED = "COUNTERS_NOT_PERMITTED"  # the driver refuses this user, or kinetod-counters this caller
    UNAVAILABLE = "COUNTERS_UNAVAILABLE"  # no driver, library or GPU that supports them
    INVALID_METRIC = "COUNTERS_INVALID_METRIC"  # unknown here, or not in one pass
    FAILED = "COUNTERS_FAILED"  # the library or kinetod-counters failed


class CounterError(Exception):
    """Counters of a GPU cannot be measured. The message says why and what to do."""

    def __init__(self, code: CounterCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class CounterMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measured metric. name: the vendor's. unit: "%", "B/s", "Hz" or the vendor's word; empty: none."""

    name: str
    label: str
    unit: str


class LeftOutMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A metric of a set that this GPU lacks, or that does not fit into one pass with those before it."""

    name: str
    why: str


class CounterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metrics that are measured together, in one pass."""

    metrics: tuple[CounterMetric, ...]
    left_out: tuple[LeftOutMetric, ...] = ()


class CounterDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU. problem: why it cannot be measured, with its code; empty: no problem is known.

    least_interval_ns: shorter intervals are refused; the default is this or DEFAULT_INTERVAL_NS, whichever is longer.
    """

    uuid: str
    index: int  # in the order of the PCI bus
    name: str
    chip: str
    pci_bus_id: str
    code: str = ""
    problem: str = ""
    least_interval_ns: int = LEAST_INTERVAL_NS


class WantedCounters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A set by its name, whose metrics may be left out, or explicit metrics, all of which must fit."""

    set_name: str = ""
    metrics: tuple[str, ...] = ()


class Sampling(Protocol):
    """A GPU that is being measured."""

    plan: CounterPlan

    def run(self) -> None:
        """Blocks until the ring is stopped, its longest duration is over, or sampling fails, which it notes in the
        ring.
        """

    def close(self) -> None:
        """Releases everything. Raises nothing."""


class CounterBackend(Protocol):
    """A backend that measures. Every method but `close` may raise CounterError. Called by several threads."""

    @property
    def serves_once(self) -> bool:
        """Whether, as far as is known, the process must end after its first sampling."""

    @property
    def name(self) -> str:
        """The name used with --backend."""

    @property
    def library_version(self) -> str:
        """Version of the library, after `open`."""

    def open(self) -> None:
        """Loads the vendor's library. Nothing is measured yet."""

    def devices(self) -> list[CounterDevice]:
        """Every GPU that the library sees."""

    def base_metrics(self, uuid: str) -> list[str]:
        """Names that this GPU has, without their submetrics."""

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """The metrics that would be measured. Touches no GPU."""

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> Sampling:
        """Starts the sampling. make_ring: creates a ring for that many metrics, which the caller owns."""


def checked_wanted(wanted: WantedCounters, sets: Sequence[str]) -> None:
    """Raises CounterError for a request that no GPU could meet."""
    if bool(wanted.set_name) == bool(wanted.metrics):
        raise CounterError(CounterCode.INVALID_METRIC, "name either one set or individual metrics")
    if wanted.set_name and wanted.set_name not in sets:
        reason = f"there is no set {wanted.set_name!r}; the sets are {', '.join(sets)}"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    if named := [name for name in wanted.metrics if name in sets]:
        reason = f"{named[0]!r} is a set; name it without other sets or metrics"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    if len(wanted.metrics) > MAX_METRICS:
        reason = f"{len(wanted.metrics)} metrics are too many: at most {MAX_METRICS} can be measured together"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    if twice := [name for name in dict.fromkeys(wanted.metrics) if wanted.metrics.count(name) > 1]:
        raise CounterError(CounterCode.INVALID_METRIC, f"{twice[0]} is named twice")


def check_interval(interval_ns: int) -> None:
    """Raises CounterError for an interval that no GPU supports."""
    if not LEAST_INTERVAL_NS <= interval_ns <= MOST_INTERVAL_NS:
        reason = f"the interval must be between 10us and 1s, not {interval_ns} ns"
        raise CounterError(CounterCode.INVALID_METRIC, reason)


# The sets of metrics that users name, for NVIDIA's chips, in order of importance.
# Written for a GH100. Metrics that a chip lacks, or that do not fit into one pass with those before them, are left out.
# If several have the same label, the first that fits is taken. `dramc__…` does not count memory utilisation: it shows
# 0.9 % during a copy that takes 87 % of it. The counters of the multiprocessors come in groups. `TPC.TriageCompute.…`
# are of the group of `sm__cycles_active`; beside a counter of another group, libcupti 13.0 takes 400 µs to decode a
# sample instead of 50: so the overview omits instructions on chips that have no such counter for them.
_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
_PER_SECOND = ".sum.per_second"


def _percent(name: str, label: str, submetric: str = _ELAPSED) -> CounterMetric:
    return CounterMetric(name=name + submetric, label=label, unit="%")


def _bytes(name: str, label: str) -> CounterMetric:
    return CounterMetric(name=name + _PER_SECOND, label=label, unit="B/s")


_GPU = _percent("gr__cycles_active", "GPU busy")
_SM = _percent("sm__cycles_active", "SM busy")  # at least one warp resident
_TENSOR = (
    _percent("TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime", "Tensor pipe"),
    _percent("sm__pipe_tensor_cycles_active", "Tensor pipe"),
)
_DRAM = _percent("dram__throughput", "DRAM")
_OCCUPANCY = _percent("sm__warps_active", "Occupancy", ".avg.pct_of_peak_sustained_active")
_INSTRUCTIONS = (
    _percent("TPC.TriageCompute.sm__inst_executed_realtime", "Instructions"),
    _percent("sm__inst_issued", "Instructions"),
)
_PCIE = (_bytes("pcie__read_bytes", "PCIe read"), _bytes("pcie__write_bytes", "PCIe write"))
_CLOCK = CounterMetric(name="gpc__cycles_elapsed.avg.per_second", label="GPC clock", unit="Hz")

OVERVIEW = "overview"
SETS: Mapping[str, Sequence[CounterMetric]] = {
    OVERVIEW: (_GPU, _SM, *_TENSOR, _DRAM, _OCCUPANCY, _INSTRUCTIONS[0], *_PCIE, _CLOCK),
    "memory": (
        _DRAM,
        _percent("dram__read_throughput", "DRAM read"),
        _percent("dram__write_throughput", "DRAM write"),
        _bytes("dram__bytes_read", "DRAM bytes read"),
        _bytes("dram__bytes_write", "DRAM bytes written"),
        CounterMetric(name="lts__t_sectors.sum.per_second", label="L2 sectors", unit="sector/s"),
        _GPU,
        _SM,
    ),
    "tensor": (
        *_TENSOR,
        _SM,
        _OCCUPANCY,
        *_INSTRUCTIONS,
        _percent("TPC.TriageCompute.sm__inst_executed_pipe_fma_realtime", "FMA pipe"),
        _percent("sm__pipe_fma_cycles_active", "FMA pipe"),
        _DRAM,
        _GPU,
        _CLOCK,
    ),
    "interconnect": (
        _bytes("nvlrx__bytes", "NVLink received"),
        _bytes("nvltx__bytes", "NVLink sent"),
        *_PCIE,
        _bytes("nvlrx__bytes_data_user", "NVLink received, data"),
        _bytes("nvltx__bytes_data_user", "NVLink sent, data"),
        _GPU,
        _DRAM,
    ),
}
_BY_NAME = {metric.name: metric for metrics in SETS.values() for metric in metrics}


def described(name: str, dimension: str) -> CounterMetric:
    """A metric that a user names. dimension: the vendor's unit of the counter, such as "byte"."""
    if (known := _BY_NAME.get(name)) is not None:
        return known
    return CounterMetric(name=name, label=name, unit=_unit(name, dimension))


def _unit(name: str, dimension: str) -> str:
    submetric = name.partition(".")[2]
    if submetric.endswith(".pct") or submetric == "pct" or ".pct_of_" in f".{submetric}":
        return "%"
    unit = {"byte": "B", "bytes": "B", "cycle": "cycle", "cycles": "cycle"}.get(dimension, dimension)
    if not submetric.endswith("per_second"):
        return unit
    return "Hz" if unit == "cycle" else f"{unit}/s"
