"""The seam between kinetod-counters and what measures: values, errors, and what a vendor's backend must offer.

Theory of operation
    counter_client.py (in the daemon)     one connection for each GPU; takes the rows, and knows what was lost
    sampler_server.py (kinetod-counters)  one thread for each GPU; the connection's end ends the sampling
    backends.py, backend_group.py         which backends there are, and those of several vendors as one
    a backend                             a folder or file for each: amdgpu, cupti, level_zero, cupti_python.py

    A backend runs in kinetod-counters only, since a driver may hang or crash. `open`, `devices`, `plan` and `start` may
    block for seconds. It holds a GPU's counters from `start` to the end of `run`, and no longer: most GPUs have one set
    of them, so that nobody else can measure meanwhile. What somebody else holds is never taken away.

    Figures are the GPU's: they tell of all its processes together.
"""

from collections.abc import Callable, Sequence
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
    """Why counters are not to be had."""

    BUSY = "COUNTERS_BUSY"  # somebody else measures this GPU
    NOT_PERMITTED = "COUNTERS_NOT_PERMITTED"  # the driver refuses this user, or kinetod-counters this caller
    UNAVAILABLE = "COUNTERS_UNAVAILABLE"  # no driver, library or GPU that could
    INVALID_METRIC = "COUNTERS_INVALID_METRIC"  # unknown here, or not in one pass
    FAILED = "COUNTERS_FAILED"  # the library or kinetod-counters failed


class CounterError(Exception):
    """Counters of a GPU cannot be measured. The text says why, and what to do."""

    def __init__(self, code: CounterCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class CounterMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A metric as it is measured. name: the vendor's. unit: "%", "B/s", "Hz" or the vendor's word; empty: none."""

    name: str
    label: str
    unit: str


class LeftOutMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A metric of a set that this GPU does not have, or not in one pass with those before it."""

    name: str
    why: str


class CounterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is measured together, in one pass."""

    metrics: tuple[CounterMetric, ...]
    left_out: tuple[LeftOutMetric, ...] = ()


class CounterDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU. problem: why it cannot be measured, with its code; empty: nothing is known against it.

    least_interval_ns: shorter ones are refused; without a wish, it or DEFAULT_INTERVAL_NS is taken, the longer one.
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
    """A set by its name, whose metrics are left out where they do not fit, or metrics, all of which must fit."""

    set_name: str = ""
    metrics: tuple[str, ...] = ()


class Sampling(Protocol):
    """A GPU that is being measured."""

    plan: CounterPlan

    def run(self) -> None:
        """Blocks until the ring is stopped, its longest duration is over, or it fails, which the ring then says."""

    def close(self) -> None:
        """Lets go of everything. Raises nothing."""


class CounterBackend(Protocol):
    """What measures. Raises CounterError everywhere but in `close`. Called by several threads."""

    @property
    def serves_once(self) -> bool:
        """Whether the process must end after its first sampling, as is known then."""

    @property
    def name(self) -> str:
        """As --backend has it."""

    @property
    def library_version(self) -> str:
        """After `open`."""

    def open(self) -> None:
        """Loads the vendor's library. Nothing is measured yet."""

    def devices(self) -> list[CounterDevice]:
        """Every GPU that the library sees."""

    def base_metrics(self, uuid: str) -> list[str]:
        """Names that this GPU has, without their submetrics."""

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """What would be measured. Touches no GPU."""

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> Sampling:
        """Begins. make_ring: a ring for so many metrics, which the caller owns."""


def checked_wanted(wanted: WantedCounters, sets: Sequence[str]) -> None:
    """Raises CounterError if this is no request that any GPU could meet."""
    if bool(wanted.set_name) == bool(wanted.metrics):
        raise CounterError(CounterCode.INVALID_METRIC, "name one set, or metrics")
    if wanted.set_name and wanted.set_name not in sets:
        reason = f"there is no set {wanted.set_name!r}; the sets are {', '.join(sets)}"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    if named := [name for name in wanted.metrics if name in sets]:
        reason = f"{named[0]!r} is a set, which is named alone: without other sets and without metrics"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    if len(wanted.metrics) > MAX_METRICS:
        reason = f"{len(wanted.metrics)} metrics are more than the {MAX_METRICS} that are measured together at most"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    if twice := [name for name in dict.fromkeys(wanted.metrics) if wanted.metrics.count(name) > 1]:
        raise CounterError(CounterCode.INVALID_METRIC, f"{twice[0]} is named twice")


def check_interval(interval_ns: int) -> None:
    """Raises CounterError for one that no GPU has."""
    if not LEAST_INTERVAL_NS <= interval_ns <= MOST_INTERVAL_NS:
        reason = f"the interval must be between 10us and 1s, not {interval_ns} ns"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
