"""The backend for AMD's GPUs: readings of gpu_metrics, a table that the kernel's driver gives everybody.

Theory of operation
    Nothing is loaded, opened or reserved on the GPU, and any number of readers have the table, so that nobody is kept
    from counters and COUNTERS_BUSY never comes. For each reading the driver asks the GPU's firmware, which is also
    what controls clocks and power, by a message; therefore the least interval is LEAST_NS, though the firmware renews
    its values every millisecond. A GPU that sleeps is not read, because reading would wake it.

    A sample is what lies between two readings. A reading that comes later than LATE intervals begins anew, and the
    time before it counts as lost; a table that the firmware has not renewed is no reading.

    rocprofiler-sdk's counting of devices is not used: it opens a queue of its own on the GPU, whose packets, at high
    priority, made programs hang that ran beside it, and it needs the GPU's profiling lock. amdgpu's perf events
    (data fabric, xGMI) exist for Vega 20 and Arcturus only.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kinetod.counters.amdgpu.amd_metrics import ALL, NO_TENSOR, AmdMetric, TableReading, known_metrics, of_set
from kinetod.counters.amdgpu.metrics_table import MAX_BYTES, MetricsTable, UnknownTableError, read_table
from kinetod.counters.interface import (
    CounterCode,
    CounterDevice,
    CounterError,
    CounterPlan,
    WantedCounters,
    checked_wanted,
)
from kinetod.counters.kernel_gpus import AMD, first_line, kernel_gpus
from kinetod.counters.metric_sets import SETS as SET_NAMES
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, Failure, RingWriter
from kinetod.processes.drm_gpus import PROC, SYS, DrmGpu, drm_gpus

LEAST_NS = 10_000_000
LATE = 4
GIVE_UP_S = 5.0  # a GPU that is being reset cannot be read for some seconds
_SYSTEM = 4  # kn_failure_kind
_TABLE = "gpu_metrics"
_GONE = (errno.ENOENT, errno.ENODEV)
_MODULE_VERSION = "module/amdgpu/version"


class AmdgpuSampling:
    """A GPU that is being read."""

    def __init__(
        self, folder: Path, plan: CounterPlan, metrics: Sequence[AmdMetric], interval_ns: int, ring: RingWriter
    ) -> None:
        self.plan = plan
        self._folder = folder
        self._metrics = metrics
        self._interval_ns = interval_ns
        self._ring = ring
        self._before: tuple[TableReading, int] | None = None  # the latest reading, and its Unix time
        self._latest_ns = 0  # until when samples or losses are told

    def run(self) -> None:
        """Reads until the end."""
        begun = good = due = time.monotonic_ns()
        while True:
            due = max(due + self._interval_ns, time.monotonic_ns())
            if self._ring.wait((due - time.monotonic_ns()) / 1e9):
                return self._ring.end(STOPPED)
            if time.monotonic_ns() - begun >= self._ring.most_ns:
                return self._ring.end(TOO_LONG)
            try:
                self._sample()
                good = time.monotonic_ns()
            except (OSError, UnknownTableError) as exc:
                self._before = None
                gone = isinstance(exc, OSError) and exc.errno in _GONE
                if gone or isinstance(exc, UnknownTableError) or time.monotonic_ns() - good > GIVE_UP_S * 1e9:
                    return self._ring.end(ERROR, _failure(exc))

    def _sample(self) -> None:
        """Raises OSError, UnknownTableError."""
        if is_asleep(self._folder):
            self._before = None
            return
        table, now_ns = gpu_table(self._folder), time.time_ns()
        after = TableReading(table=table, time_ns=time.monotonic_ns())
        before, self._before = self._before, (after, now_ns)
        if before is None:
            self._note_lost(now_ns)
            return
        reading, start_ns = before
        if (stamp := table.fields.get("firmware_timestamp")) and stamp == reading.table.fields.get(
            "firmware_timestamp"
        ):
            self._before = before
            return
        if after.time_ns - reading.time_ns > LATE * self._interval_ns or now_ns <= start_ns:
            self._note_lost(now_ns)
            return
        values = [metric.value(reading, after) for metric in self._metrics]
        self._ring.put(start_ns, now_ns, np.array(values, dtype=np.float32))
        self._latest_ns = now_ns

    def _note_lost(self, now_ns: int) -> None:
        if self._latest_ns and now_ns > self._latest_ns:
            self._ring.note_gap(now_ns - self._latest_ns)
        self._latest_ns = now_ns

    def close(self) -> None:
        """Does nothing: nothing is held."""


class AmdgpuBackend:
    """Implements interface.CounterBackend. sys, proc: where /sys and /proc are."""

    name = "amdgpu"
    serves_once = False

    def __init__(self, *, sys: Path = SYS, proc: Path = PROC) -> None:
        self._sys = sys
        self._proc = proc
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self.library_version = ""

    def open(self) -> None:
        """Finds the driver's version, or that of the kernel that it is part of."""
        self.library_version = first_line(self._sys / _MODULE_VERSION) or first_line(
            self._proc / "sys/kernel/osrelease"
        )

    def devices(self) -> list[CounterDevice]:
        """Every GPU of AMD's that the driver has."""
        drivers = {gpu.pci_bus_id: gpu for gpu in drm_gpus(self._sys, self._proc)}
        known = [gpu for gpu in kernel_gpus(AMD, self._sys, self._proc) if gpu.pci_bus_id in drivers]
        if not known:
            raise CounterError(CounterCode.UNAVAILABLE, "no GPU of AMD has the driver amdgpu on this host")
        with self._lock:
            self._folders = {gpu.uuid: drivers[gpu.pci_bus_id].folder for gpu in known}
        return [self._described(gpu, drivers[gpu.pci_bus_id]) for gpu in known]

    def _described(self, gpu: CounterDevice, driver: DrmGpu) -> CounterDevice:
        code = problem = ""
        try:
            checked_table(driver.folder)
        except CounterError as exc:
            code, problem = exc.code, exc.reason
        chip = _chip(driver.render, self._sys)
        return msgspec.structs.replace(gpu, chip=chip, code=code, problem=problem, least_interval_ns=LEAST_NS)

    def _folder(self, uuid: str) -> Path:
        if uuid not in self._folders:
            self.devices()
        if (folder := self._folders.get(uuid)) is None:
            reason = f"there is no GPU {uuid}; `kinetoctl counters list` has those that can be measured"
            raise CounterError(CounterCode.UNAVAILABLE, reason)
        return folder

    def _table(self, uuid: str) -> MetricsTable:
        folder = self._folder(uuid)
        try:
            return checked_table(folder)
        except CounterError as exc:
            raise CounterError(exc.code, f"GPU {uuid}: {exc.reason}") from exc

    def base_metrics(self, uuid: str) -> list[str]:
        """What the table has."""
        return list(known_metrics(self._table(uuid)))

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """All that is wanted fits together, if the table has it."""
        return self._chosen(uuid, wanted)[0]

    def _chosen(self, uuid: str, wanted: WantedCounters) -> tuple[CounterPlan, list[AmdMetric]]:
        checked_wanted(wanted, tuple(SET_NAMES))
        table = self._table(uuid)
        if wanted.set_name:
            chosen, left_out = of_set(table, wanted.set_name)
            if not chosen:
                why = left_out[0].why if left_out else NO_TENSOR
                reason = f"GPU {uuid}: there is no metric of the set {wanted.set_name}: {why}"
                raise CounterError(CounterCode.INVALID_METRIC, reason)
            plan = CounterPlan(metrics=tuple(each.metric for each in chosen), left_out=tuple(left_out))
            return plan, chosen
        known = known_metrics(table)
        if missing := [name for name in wanted.metrics if name not in known]:
            everywhere = {each.metric.name for each in ALL}
            why = (
                f"the table of this GPU, version {table.version}, does not have {missing[0]!r}"
                if missing[0] in everywhere
                else f"there is no metric {missing[0]!r}"
            )
            reason = f"GPU {uuid}: {why}; `kinetoctl counters list --metrics` prints all"
            raise CounterError(CounterCode.INVALID_METRIC, reason)
        chosen = [known[name] for name in wanted.metrics]
        return CounterPlan(metrics=tuple(each.metric for each in chosen)), chosen

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> AmdgpuSampling:
        """Begins."""
        if interval_ns < LEAST_NS:
            reason = (
                f"GPU {uuid}: an interval of {interval_ns / 1e6:g} ms is too short: for each reading of an AMD GPU its "
                f"firmware is asked, which also controls its clocks; use {LEAST_NS / 1e6:g} ms or more"
            )
            raise CounterError(CounterCode.INVALID_METRIC, reason)
        plan, chosen = self._chosen(uuid, wanted)
        return AmdgpuSampling(self._folder(uuid), plan, chosen, interval_ns, make_ring(len(chosen)))


def is_asleep(folder: Path) -> bool:
    """Whether the GPU is suspended; asking does not wake it."""
    return first_line(folder / "power/runtime_status") in ("suspended", "suspending")


def gpu_table(folder: Path) -> MetricsTable:
    """Reads the table. Raises OSError, UnknownTableError."""
    descriptor = os.open(folder / _TABLE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_table(os.read(descriptor, MAX_BYTES))
    finally:
        os.close(descriptor)


def checked_table(folder: Path) -> MetricsTable:
    """The table of a GPU that can be measured. Raises CounterError."""
    if is_asleep(folder):
        reason = "the GPU sleeps, and reading its counters would wake it: start the program first"
        raise CounterError(CounterCode.UNAVAILABLE, reason)
    try:
        table = gpu_table(folder)
    except PermissionError as exc:
        if exc.errno == errno.EPERM:  # what the driver says of a GPU that is being reset
            raise CounterError(CounterCode.UNAVAILABLE, _unreadable(exc)) from exc
        reason = f"the driver's table {folder / _TABLE} is not readable for this user"
        raise CounterError(CounterCode.NOT_PERMITTED, reason) from exc
    except FileNotFoundError as exc:
        reason = "the driver has no table gpu_metrics of this GPU: it is too old, or a virtual one"
        raise CounterError(CounterCode.UNAVAILABLE, reason) from exc
    except OSError as exc:
        raise CounterError(CounterCode.UNAVAILABLE, _unreadable(exc)) from exc
    except UnknownTableError as exc:
        raise CounterError(CounterCode.UNAVAILABLE, f"the driver's table gpu_metrics cannot be read: {exc}") from exc
    if not known_metrics(table):
        raise CounterError(CounterCode.UNAVAILABLE, "the driver's table gpu_metrics of this GPU is empty")
    return table


def _unreadable(error: OSError) -> str:
    return f"the driver cannot read the GPU now ({error.strerror}): it may be in a reset; `dmesg` has more"


def _failure(error: Exception) -> Failure:
    number = error.errno or 0 if isinstance(error, OSError) else 0
    text = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return Failure(kind=_SYSTEM, result=number, call=_TABLE.encode(), text=text.encode()[:400])


def _chip(render: str, sys: Path) -> str:
    """Such as "gfx942", by ROCm's part of the driver; empty where it does not have the GPU."""
    for node in (sys / "class/kfd/kfd/topology/nodes").glob("*/properties"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
            if f"renderD{facts['drm_render_minor'].strip()}" == render:
                version = int(facts["gfx_target_version"])
                return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return ""
