"""The GPUs as Prometheus metrics, read at each scrape.

The labels are those of dcgm-exporter, so that both join on UUID and pci_bus_id; its counters are not repeated under its
names. Missing values have no series.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kinetod.gpus.gpu_owners import GpuContainer, Jobs, Owners, jobs_of
from kinetod.gpus.gpu_types import GpuState, LibraryState, Snapshot
from kinetod.processes.drm_gpus import PROC, SYS, drm_gpus, nvidia_gpus

DEADLINE_S = 1.2
LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "pod", "namespace", "container", "hpc_job")

_NOBODY = GpuContainer()
_GAUGES: Sequence[tuple[str, str, str]] = (
    ("kineto_gpu_up", "1: the GPU is responding; 0: it has fallen off the bus or must be reset.", "works"),
    ("kineto_gpu_memory_total_bytes", "Total memory of the GPU.", "memory_total_bytes"),
    ("kineto_gpu_memory_used_bytes", "Memory of the GPU in use.", "memory_used_bytes"),
    ("kineto_gpu_utilization_ratio", "Share of the driver's last period in which a kernel ran.", "utilization"),
    (
        "kineto_gpu_memory_utilization_ratio",
        "Share of the driver's last period in which memory was read or written.",
        "memory_utilization",
    ),
    ("kineto_gpu_power_watts", "Power drawn.", "power_watts"),
    ("kineto_gpu_power_limit_watts", "Power limit.", "power_limit_watts"),
    ("kineto_gpu_temperature_celsius", "Temperature of the GPU.", "temperature_celsius"),
    ("kineto_gpu_memory_temperature_celsius", "Temperature of the GPU's memory.", "memory_temperature_celsius"),
    ("kineto_gpu_sm_clock_hertz", "Clock rate of the multiprocessors.", "sm_clock_hertz"),
    ("kineto_gpu_memory_clock_hertz", "Clock rate of the memory.", "memory_clock_hertz"),
    (
        "kineto_gpu_pcie_transmit_bytes_per_second",
        "Data sent over PCIe per second, measured by the driver over 20 ms, since it keeps no counter.",
        "pcie_transmit_bytes_per_second",
    ),
    (
        "kineto_gpu_pcie_receive_bytes_per_second",
        "Data received over PCIe per second, measured by the driver over 20 ms, since it keeps no counter.",
        "pcie_receive_bytes_per_second",
    ),
)
_COUNTERS: Sequence[tuple[str, str, str]] = (
    ("kineto_gpu_energy_joules", "Energy used since the driver was loaded.", "energy_joules"),
    ("kineto_gpu_nvlink_transmit_bytes", "Data sent over all NVLinks.", "nvlink_transmit_bytes"),
    ("kineto_gpu_nvlink_receive_bytes", "Data received over all NVLinks.", "nvlink_receive_bytes"),
)
_OBSERVED = ("kineto_gpu_activity_observed_seconds", "Time over which the activity of the GPU's units was counted.")
_ACTIVITY: Sequence[tuple[str, str, str]] = (
    ("kineto_gpu_graphics_active_seconds", "Time in which a graphics or compute engine was active.", "graphics_active"),
    ("kineto_gpu_sm_active_seconds", "Time in which multiprocessors had a warp, averaged over all.", "sm_active"),
    ("kineto_gpu_sm_occupancy_seconds", "Time weighted by the share of warps that were resident.", "sm_occupancy"),
    ("kineto_gpu_tensor_active_seconds", "Time in which tensor cores were active, averaged over all.", "tensor_active"),
    ("kineto_gpu_dram_active_seconds", "Time weighted by the share of memory bandwidth in use.", "dram_active"),
    ("kineto_gpu_fp64_active_seconds", "Time in which FP64 pipes were active, tensor cores excluded.", "fp64_active"),
    ("kineto_gpu_fp32_active_seconds", "Time in which FP32 pipes were active, tensor cores excluded.", "fp32_active"),
    ("kineto_gpu_fp16_active_seconds", "Time in which FP16 pipes were active, tensor cores excluded.", "fp16_active"),
    ("kineto_gpu_pcie_transmit_bytes", "Data sent over PCIe, headers included.", "pcie_transmit"),
    ("kineto_gpu_pcie_receive_bytes", "Data received over PCIe, headers included.", "pcie_receive"),
)


class GpuCollector(Collector):
    """GPU metrics from the vendors' libraries.

    read: returns a snapshot within the given seconds. owners: owners of a snapshot's GPUs, by UUID. jobs: the cluster's
    allocations to batch jobs. A shared GPU has none of their names; kineto_gpu_container_info and kineto_gpu_job_info
    have them all.
    """

    def __init__(
        self,
        read: Callable[[float], Snapshot],
        hostname: str,
        *,
        owners: Callable[[Snapshot], Owners] = lambda _: {},
        jobs: Callable[[], Jobs] = dict,
        proc: Path = PROC,
        sys: Path = SYS,
    ) -> None:
        self._read = read
        self._hostname = hostname
        self._owners = owners
        self._jobs = jobs
        self._proc = proc
        self._sys = sys

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return [*_families(()), _containers(()), _batch_jobs(()), _present({}), *_libraries(Snapshot())]

    def collect(self) -> Iterable[Metric]:
        """Every family, including one that shows which libraries fail."""
        snapshot = self._read(DEADLINE_S)
        owners = self._owners(snapshot)
        found = self._jobs()
        jobs = {gpu.uuid: jobs_of(gpu, found) for gpu in snapshot.gpus}
        yield from _families(
            [
                (gpu, self._labels(gpu, _only(owners.get(gpu.uuid, ())), _only_job(jobs[gpu.uuid])))
                for gpu in snapshot.gpus
            ]
        )
        yield _containers(
            [
                (self._labels(gpu, owner, _only_job(jobs[gpu.uuid])), owner)
                for gpu in snapshot.gpus
                for owner in owners.get(gpu.uuid, ())
                if owner.container_id or owner.pod_uid
            ]
        )
        yield _batch_jobs(self._labels(gpu, _NOBODY, job) for gpu in snapshot.gpus for job in jobs[gpu.uuid])
        yield _present(present(self._proc, self._sys))
        yield from _libraries(snapshot)

    def _labels(self, gpu: GpuState, owner: GpuContainer, job: str) -> list[str]:
        return [
            str(gpu.index),
            gpu.uuid,
            gpu.pci_bus_id,
            gpu.device,
            gpu.name,
            self._hostname,
            owner.pod,
            owner.namespace,
            owner.container,
            job,
        ]


def _only(owners: Sequence[GpuContainer]) -> GpuContainer:
    return owners[0] if len(owners) == 1 else _NOBODY


def _only_job(jobs: Sequence[str]) -> str:
    return jobs[0] if len(jobs) == 1 else ""


def _batch_jobs(labelled: Iterable[list[str]]) -> Metric:
    family = GaugeMetricFamily(
        "kineto_gpu_job_info", "1 for each batch job to which the GPU is allocated.", labels=LABELS
    )
    for labels in labelled:
        family.add_metric(labels, 1)
    return family


def _containers(owners: Iterable[tuple[list[str], GpuContainer]]) -> Metric:
    family = GaugeMetricFamily(
        "kineto_gpu_container_info",
        "1 for each container with processes on the GPU.",
        labels=(*LABELS, "container_id", "runtime", "pod_uid"),
    )
    for labels, owner in owners:
        family.add_metric([*labels, owner.container_id, owner.runtime, owner.pod_uid], 1)
    return family


def _families(labelled: Sequence[tuple[GpuState, list[str]]]) -> Iterable[Metric]:
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, text, attribute in table:
            family = kind(name, text, labels=LABELS)
            for gpu, labels in labelled:
                if (value := getattr(gpu, attribute)) is not None:
                    family.add_metric(labels, value)
            yield family
    yield from _activity(labelled)
    processes = GaugeMetricFamily("kineto_gpu_processes", "Processes that have a context on the GPU.", labels=LABELS)
    ecc = CounterMetricFamily(
        "kineto_gpu_ecc_errors", "Memory errors since the driver was loaded.", labels=(*LABELS, "type")
    )
    xid = CounterMetricFamily(
        "kineto_gpu_xid_errors",
        "Errors reported by the driver since kinetod began to monitor the GPU.",
        labels=(*LABELS, "xid"),
    )
    for gpu, labels in labelled:
        if gpu.works:
            processes.add_metric(labels, len(gpu.processes))
        for kind_of, count in (("corrected", gpu.ecc_corrected), ("uncorrected", gpu.ecc_uncorrected)):
            if count is not None:
                ecc.add_metric([*labels, kind_of], count)
        for number, count in sorted(gpu.xid_errors.items()):
            xid.add_metric([*labels, str(number)], count)
    yield from (processes, ecc, xid)


def _activity(labelled: Sequence[tuple[GpuState, list[str]]]) -> Iterable[Metric]:
    counted = [(labels, gpu.activity) for gpu, labels in labelled if gpu.activity is not None]
    observed = CounterMetricFamily(*_OBSERVED, labels=LABELS)
    for labels, activity in counted:
        observed.add_metric(labels, activity.seconds)
    yield observed
    for name, text, unit in _ACTIVITY:
        family = CounterMetricFamily(name, text, labels=LABELS)
        for labels, activity in counted:
            if unit in activity.totals:
                family.add_metric(labels, activity.totals[unit])
        yield family


def _libraries(snapshot: Snapshot) -> Iterable[Metric]:
    up = GaugeMetricFamily(
        "kineto_gpu_library_up",
        "1: the vendor's library is responding; 0: it is absent, failed or late.",
        labels=["library"],
    )
    seconds = GaugeMetricFamily(
        "kineto_gpu_library_duration_seconds", "Duration of the last reading through the library.", labels=["library"]
    )
    driver = GaugeMetricFamily("kineto_gpu_driver_info", "The driver's version.", labels=["library", "version"])
    for library in snapshot.libraries:
        up.add_metric([library.name], library.state is LibraryState.OK)
        if library.state is LibraryState.OK:
            seconds.add_metric([library.name], library.seconds)
            driver.add_metric([library.name, library.driver_version], 1)
    return up, seconds, driver


def _present(counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily("kineto_gpus_present", "GPUs that the kernel driver lists.", labels=["vendor"])
    for vendor, count in counts.items():
        family.add_metric([vendor], count)
    return family


def present(proc: Path = PROC, sys: Path = SYS) -> dict[str, int]:
    """The number of GPUs of the drivers, by vendor, without any library."""
    counts = Counter(gpu.vendor for gpu in drm_gpus(sys, proc))
    compute = 0
    for identity in (sys / "class/kfd/kfd/topology/nodes").glob("*/gpu_id"):
        try:
            compute += identity.read_text().strip() not in ("", "0")  # 0: a CPU
        except OSError:
            continue
    return {"nvidia": len(nvidia_gpus(proc)), "amd": max(compute, counts["amd"]), "intel": counts["intel"]}
