"""A GPU as Dynolog reports it, as far as the vendor's library tells it: no DCGM is asked.

What the GPU or its library does not have is left out. Rates and shares are over the interval, as DCGM's are, and from
the same counters on NVIDIA's GPUs from Hopper on. Without these, PCIe's rates are what the driver measured for 20 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kinetod.gpus.container_owners import GpuContainer
from kinetod.gpus.gpu_activity import between
from kinetod.gpus.gpu_types import GpuState
from kinetod.gpus.slurm_variables import Said, agreed
from kinetod.processes import batch_jobs, credentials
from kinetod.processes.credentials import PROC
from kinetod.processes.process_info import user_name
from kinetod.telemetry.dynolog.host_values import Value

_NVIDIA_DEVICE = "nvidia"
MHZ = 10**6
# DCGM's profiling fields under the names of dynolog/src/gpumon/DcgmGroupInfo.cpp: shares are 0 to 1 there, too.
_SHARES = {
    "graphics_engine_active_ratio": "graphics_active",
    "sm_active_ratio": "sm_active",
    "sm_occupancy": "sm_occupancy",
    "tensorcore_active": "tensor_active",
    "hbm_mem_bw_util": "dram_active",
    "fp64_active": "fp64_active",
    "fp32_active": "fp32_active",
    "fp16_active": "fp16_active",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """Who uses a GPU. Empty: nobody, several, or not known."""

    job_id: str = ""
    username: str = ""
    slurm_account: str = ""
    slurm_partition: str = ""
    pod_namespace: str = ""
    pod_name: str = ""
    container_name: str = ""


def gpu_values(gpu: GpuState, before: GpuState | None, seconds: float, user: GpuUser) -> dict[str, Value]:
    """The values under Dynolog's names: power and shares as float, texts as str, all else as int.

    before: the same GPU at the beginning of the interval of `seconds`, or None.
    """
    sent = _rate(gpu.nvlink_transmit_bytes, before.nvlink_transmit_bytes if before else None, seconds)
    received = _rate(gpu.nvlink_receive_bytes, before.nvlink_receive_bytes if before else None, seconds)
    active = between(before.activity if before else None, gpu.activity)
    known: dict[str, Value | None] = {
        **{name: active.get(unit) for name, unit in _SHARES.items()},
        "gpu_frequency_mhz": _rounded(gpu.sm_clock_hertz, 1 / MHZ),
        "gpu_device_utilization": _rounded(gpu.utilization, 100),
        "gpu_memory_utilization": _rounded(gpu.memory_utilization, 100),
        "gpu_power_draw": gpu.power_watts,
        "pcie_tx_bytes": _rounded(active.get("pcie_transmit", gpu.pcie_transmit_bytes_per_second)),
        "pcie_rx_bytes": _rounded(active.get("pcie_receive", gpu.pcie_receive_bytes_per_second)),
        "nvlink_tx_bytes": _rounded(active.get("nvlink_transmit", sent)),
        "nvlink_rx_bytes": _rounded(active.get("nvlink_receive", received)),
        "minor_id": _minor(gpu.device),
        "gpu_name": gpu.name or None,
        "gpu_uuid": gpu.uuid or None,
        "job_id": user.job_id or None,
        "username": user.username or None,
        "slurm_account": user.slurm_account or None,
        "slurm_partition": user.slurm_partition or None,
        "pod_namespace": user.pod_namespace or None,
        "pod_name": user.pod_name or None,
        "container_name": user.container_name or None,
        "device": gpu.index,
    }
    return {name: value for name, value in known.items() if value is not None}


def gpu_user(
    gpu: GpuState,
    owners: Sequence[GpuContainer],
    jobs: Sequence[str],
    proc: Path = PROC,
    *,
    said: Said = MappingProxyType({}),
) -> GpuUser:
    """Who uses the GPU, by the cluster's word, else by the kernel's: what its processes agree on. Blocks.

    owners: the containers on it; jobs: what the batch system says it was given to; said: what its processes say of
    their job in Slurm, which the kernel does not know.
    """
    slurm = agreed(gpu.processes, said)
    owner = owners[0] if len(owners) == 1 else GpuContainer()
    job_id, uids = "", set[int]()
    if len(jobs) == 1:
        job_id = jobs[0]
    elif not jobs:
        of_processes = {job.id if (job := batch_jobs.job_of(each.pid, proc)) else "" for each in gpu.processes}
        job_id = of_processes.pop() if len(of_processes) == 1 else ""
    for process in gpu.processes:
        try:
            uids.add(credentials.read(process.pid, proc=proc).uid)
        except OSError:  # it has ended
            continue
    return GpuUser(
        job_id=job_id,
        username=user_name(uids.pop()) if len(uids) == 1 else "",
        slurm_account=slurm.account,
        slurm_partition=slurm.partition,
        pod_namespace=owner.namespace,
        pod_name=owner.pod,
        container_name=owner.container,
    )


def _rounded(value: float | None, factor: float = 1) -> int | None:
    return None if value is None else round(value * factor)


def _rate(now: int | None, before: int | None, seconds: float) -> float | None:
    """Bytes per second between two counters; None if one is missing, or it was reset."""
    if now is None or before is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds


def _minor(device: str) -> int | None:
    number = device.removeprefix(_NVIDIA_DEVICE)
    return int(number) if number != device and number.isdecimal() else None
