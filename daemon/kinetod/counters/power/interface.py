"""Sources of power, clocks, temperature and throttling of a GPU, and the protocol with the process that reads them.

Theory of operation
    power_recording.py (in the daemon)   opens the files, starts the process, reports the result for each GPU
    power_process.py (the process)       one thread for each GPU: a reading, a row, every PERIOD_NS
    a source                             a class for each kind of GPU, in power_process.py

    These values need no lock and no permission: they are available even if somebody else has the hardware counters of
    the GPU, or the driver refuses them. A driver may hang in any call, so a separate process makes the calls, for one
    capture; the process that reads GPUs for metrics (kinetod.gpus) would be late for both. It may be killed at any
    moment: rows are written whole, and a truncated row is ignored.

    A reading is the driver's current values. A row spans two readings and has the values of the later one, except for
    counters (energy), which give the exact value in between. The times of a row show if it is longer than the period;
    nothing is written for a time longer than MOST_ROW_NS: the gap counts as a loss.

    Some values cost a driver milliseconds (on an H200 with driver 580 the energy counter 4 and the highest clock 1 to
    2, all others microseconds). These are read every WHOLE_EVERY readings, and apply to all rows since then: that many
    rows are written at a time.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
from kineto_trace.spool.counter_samples import SUFFIX

from kinetod.counters.interface import MOST_DURATION_NS

PERIOD_NS = 50_000_000  # NVIDIA's drivers measure power every 20 to 100 ms
MOST_ROW_NS = 1_000_000_000  # a busy host delays readings; a longer time without one is a gap
MAX_FILE_BYTES = 64 << 20  # for one GPU: 15 hours
WHOLE_EVERY = 10  # readings
SET_NAME = "power"
POWER_SUFFIX = f".power{SUFFIX}"  # of a file
POWER, MEAN_POWER, POWER_LIMIT = "Power", "Power, mean", "Power limit"
SM_CLOCK, MOST_SM_CLOCK, MEMORY_CLOCK = "SM clock", "SM clock maximum", "Memory clock"
TEMPERATURE = "Temperature"
BY_POWER, BY_HEAT, BY_HARDWARE = "Throttled by power", "Throttled by heat", "Throttled by hardware"


class PowerMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a GPU. name: the vendor's. label: one of the words above.

    counter: its readings only grow, and a row has its growth per second. costly: not part of every reading.
    """

    name: str
    label: str
    unit: str
    counter: bool = False
    costly: bool = False


class PowerSource(Protocol):
    """One GPU. Used by one thread."""

    backend: str
    library_version: str
    index: int
    chip: str
    metrics: tuple[PowerMetric, ...]  # those that this GPU has

    def read(self, whole: bool) -> Sequence[float | None]:
        """Current values; None for a metric that is unavailable, and for costly metrics unless `whole`.

        Raises CounterError if the GPU is gone.
        """


class PowerTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU to read. pci_bus_id: set for AMD's and Intel's. descriptors: its files, open for writing and empty."""

    uuid: str
    descriptors: tuple[int, ...]
    pci_bus_id: str = ""


class PowerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The first line for the process. Each later line is the index of a GPU here whose reading is to end.

    The end of its standard input ends all.
    """

    gpus: tuple[PowerTarget, ...]
    period_ns: int = PERIOD_NS
    most_ns: int = MOST_DURATION_NS
    max_bytes: int = MAX_FILE_BYTES  # of each file


class PowerNews(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the process's answer. gpu: index in the request.

    Without a code, its first row will come. With a CounterCode, it could not be read, or its rows end here.
    """

    gpu: Annotated[int, msgspec.Meta(ge=0)]
    code: str = ""
    reason: str = ""
