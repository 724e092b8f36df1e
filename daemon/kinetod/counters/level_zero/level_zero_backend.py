"""The backend of Intel's GPUs: the metric streamer of Level Zero's tools.

Which groups of metrics a GPU has is asked once for each: of a Data Center GPU Max there are thousands of metrics.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from kinetod.counters.interface import (
    CounterCode,
    CounterDevice,
    CounterError,
    CounterPlan,
    WantedCounters,
    checked_wanted,
)
from kinetod.counters.level_zero.level_zero_results import (
    INSTALL,
    RESTRICTIONS,
    not_started,
    rights_problem,
    translated,
)
from kinetod.counters.level_zero.metric_formulas import (
    INTEL_SETS,
    GroupPlan,
    offered,
    planned_metrics,
    planned_set,
    usable,
)
from kinetod.counters.level_zero.metric_sampling import LevelZeroSampling
from kinetod.counters.level_zero.tools_library import IntelGpu, LevelZeroFailure, MetricGroup, ToolsLibrary
from kinetod.counters.sample_rings import NativeLibraryError, RingWriter
from kinetod.gpus.intel import INSTALL as INSTALL_LOADER
from kinetod.processes.drm_gpus import INTEGRATED, PROC, SYS, drm_gpus


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
            False  # until the driver does not close a stream: the process holds the counters from then on
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
        """Every GPU of Intel's. An integrated one counts only where there is no other, as elsewhere in kinetod."""
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
            reason = f"it has {gpu.tiles} tiles, whose counters come separately and at times of their own"
            return CounterCode.UNAVAILABLE, reason
        if reason := rights_problem(drivers, self._proc):
            return CounterCode.NOT_PERMITTED, reason
        try:
            if not self._groups_of(gpu):
                return CounterCode.UNAVAILABLE, f"the driver has no metrics of it: {INSTALL}"
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
            reason = f"there is no GPU {uuid}; `kinetoctl counters list` has those that can be measured"
            raise CounterError(CounterCode.UNAVAILABLE, reason)
        if device.problem:
            raise CounterError(CounterCode(device.code), f"GPU {uuid}: {device.problem}")
        return self._gpus[uuid]

    def base_metrics(self, uuid: str) -> list[str]:
        """All metrics, as Group.Metric."""
        return offered(self._groups_of(self._gpu(uuid)))

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """What one group has."""
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
        """Begins to sample."""
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
