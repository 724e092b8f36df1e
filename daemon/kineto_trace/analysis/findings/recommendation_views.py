"""Recommendations from the figures of the overview, by the seven rules of the TensorBoard profiler plug-in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.kernels.precision_views import TensorUse, tensor_use
from kineto_trace.analysis.overview.gpu_figures import GpuFigures, gpu_abilities, gpu_figures, is_count
from kineto_trace.analysis.overview.step_breakdown import Breakdown, breakdown
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.kernel_types import communication_names, communication_op_names
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES
from kineto_trace.structure.activity_links import device_properties, gpu_vendor
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

DATA_LOADING_SHARE = 0.05  # of the mean step
COMMUNICATION_SHARE = 0.10
LOW_UTILIZATION = 0.5
NCCL_CAPABILITY = 3.5
TENSOR_CORE_CAPABILITY = 7
MEMORY_SHARE = 0.9
_GB = 1 << 30

_ADVICE = {
    "data_loading": "Load batches in worker processes: set num_workers and pin_memory of the DataLoader; "
    "move costly transformations out of the training loop.",
    "data_parallel": "Use DistributedDataParallel, one process per GPU: DataParallel copies the model in every step "
    "and drives all GPUs from one process.",
    "nccl_backend": 'Initialise torch.distributed with backend="nccl": it is the fastest backend for GPUs.',
    "communication": "Send less, or less often: accumulate gradients over several batches, compress them "
    "(DDP communication hooks), or enlarge the batch. Larger batches can change convergence; optimizers such as "
    "LAMB are made for them.",
    "low_utilization": "Give the GPU more work per launch: enlarge the batch, fuse kernels (torch.compile) or replay "
    "CUDA graphs. Larger batches can change convergence.",
    "tensor_cores": "Use automatic mixed precision (torch.autocast), or allow TF32 for float32: these operators could "
    "use tensor cores, but do not.",
    "memory": "Store fewer activations (activation checkpointing) or smaller ones (mixed precision): the GPU's memory "
    "is almost full.",
}


class Recommendation(NamedTuple):
    """A rule that applies. value and threshold are in `unit`."""

    rule: str
    value: float
    threshold: float
    unit: str
    evidence: str


@dataclass(frozen=True, slots=True)
class RecommendationFacts:
    """What the rules evaluate.

    devices: properties by number.
    peaks: allocated bytes of each (device, its memory).
    advice: replaces _ADVICE for some rules, where it does not suit the GPUs.
    """

    steps: Breakdown
    gpus: list[GpuFigures]
    use: TensorUse
    names: frozenset[str]
    used_devices: int
    capabilities: Mapping[int, float]
    uses_nccl: bool
    tensor_devices: list[int]
    peaks: list[tuple[int, int, int]]
    advice: Mapping[str, str] = field(default_factory=dict)


@view(
    "recommendations",
    columns(
        ("rule", "text", "", "short name of the rule"),
        ("value", "float", "", "figure that triggered the rule, in `unit`"),
        ("threshold", "float", "", "threshold that the figure exceeds, in `unit`"),
        ("unit", "text", "", "% (of the mean step, of time or of memory), or what is counted"),
        ("advice", "text", "", "what to do"),
        ("evidence", "text", "", "where the figure comes from"),
    ),
)
def recommendations(context: Context) -> Answer:
    """What to change first: one row for each figure of the overview that exceeds its threshold.

    The rules:
    - data_loading: more than 5 % of the mean step is spent waiting for data.
    - data_parallel: DataParallel runs on more than one GPU.
    - nccl_backend: DistributedDataParallel runs without NCCL on NVIDIA GPUs of compute capability 3.5 or higher.
    - communication: more than 10 % of the mean step is communication that no other work hides.
    - low_utilization: a GPU runs kernels in less than 50 % of the steps' time.
    - tensor_cores: no kernel uses tensor cores on a GPU that has them (NVIDIA: compute capability 7 or higher),
      although some operators could.
    - memory: more than 90 % of a GPU's memory was allocated at some time (needs recorded allocations).

    The advice names only what the GPUs of the trace can do: bfloat16 and TF32 from compute capability 8.0 on,
    torch.compile from 7.0 on, and a larger batch only where memory is left.
    """
    return recommendation_columns(_facts(context))


def recommendation_columns(facts: RecommendationFacts) -> Answer:
    """The columns of the view: one row for each rule that applies."""
    found = [*_distributed(facts), *_gpus(facts)]
    loading = facts.steps.average("dataloader")
    if loading > DATA_LOADING_SHARE:
        found.insert(0, _share("data_loading", loading, DATA_LOADING_SHARE, "mean step is spent waiting for batches"))
    found += [
        _share("memory", peak / memory, MEMORY_SHARE, f"{memory / _GB:.1f} GB of GPU {device} was allocated")
        for device, peak, memory in facts.peaks
        if is_full(peak, memory) and memory > 0
    ]
    return _answer(found, {**_ADVICE, **facts.advice}, [] if found else ["no figure exceeds its threshold"])


def is_full(peak: int, memory: int) -> bool:
    """Returns whether a peak is too much for a GPU with this memory; both in bytes."""
    return peak > memory * MEMORY_SHARE


def _answer(found: list[Recommendation], advice: Mapping[str, str], notes: list[str]) -> Answer:
    values = {name: [getattr(finding, name) for finding in found] for name in Recommendation._fields}
    return Answer({**values, "advice": [advice[finding.rule] for finding in found]}, notes)


def _share(rule: str, value: float, threshold: float, evidence: str) -> Recommendation:
    return Recommendation(rule, 100 * value, 100 * threshold, "%", f"{100 * value:.1f} % of the {evidence}")


def _distributed(facts: RecommendationFacts) -> list[Recommendation]:
    found = []
    if "DataParallel.forward" in facts.names and facts.used_devices > 1:
        evidence = f"DataParallel.forward was called, and {facts.used_devices} GPUs had work"
        found.append(Recommendation("data_parallel", facts.used_devices, 1, "GPUs", evidence))
    capable = {device: value for device, value in facts.capabilities.items() if value >= NCCL_CAPABILITY}
    if "DistributedDataParallel.forward" in facts.names and not facts.uses_nccl and capable:
        device, value = next(iter(capable.items()))
        evidence = (
            f"DistributedDataParallel.forward was called without NCCL; GPU {device} has compute capability {value}"
        )
        found.append(Recommendation("nccl_backend", value, NCCL_CAPABILITY, "compute capability", evidence))
    communication = facts.steps.average("communication")
    if communication > COMMUNICATION_SHARE:
        found.append(
            _share("communication", communication, COMMUNICATION_SHARE, "mean step is spent only on communication")
        )
    return found


def _gpus(facts: RecommendationFacts) -> list[Recommendation]:
    found = []
    low = [gpu for gpu in facts.gpus if gpu.kernels and gpu.utilization < LOW_UTILIZATION]
    if low:
        worst = min(gpu.utilization for gpu in low)
        listed = ", ".join(f"GPU {gpu.device}: {100 * gpu.utilization:.1f} %" for gpu in low)
        found.append(
            Recommendation("low_utilization", 100 * worst, 100 * LOW_UTILIZATION, "%", f"utilization of {listed}")
        )
    if facts.tensor_devices and facts.use.eligible_share > 0:
        listed = ", ".join(str(device) for device in facts.tensor_devices)
        evidence = f"operators' kernel time could use tensor cores, but no kernel on GPU {listed} uses them"
        found.append(_share("tensor_cores", facts.use.eligible_share, 0, evidence))
    return found


def _facts(context: Context) -> RecommendationFacts:
    """Returns the exact figures of all GPUs."""
    trace, gpus, use = context.trace, context.get(gpu_figures), context.get(tensor_use)
    able = context.get(gpu_abilities)
    kernels = unique_values(trace.table("kernel")["name"])
    host = [unique_values(trace.table(kind)["name"]) for kind in OP_TABLES]
    nccl_ops = np.flatnonzero(context.get(communication_op_names))
    nccl_names = {number for number in nccl_ops.tolist() if trace.strings[number].startswith(("nccl:", "rccl:"))}
    properties = context.get(device_properties)
    nvidia = context.get(gpu_vendor) in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)  # others number their GPUs otherwise
    return RecommendationFacts(
        steps=context.get(breakdown),
        gpus=gpus,
        use=use,
        names=frozenset(trace.strings[number] for names in host for number in names.tolist()),
        used_devices=len(gpus),
        capabilities=capabilities(properties) if nvidia else {},
        uses_nccl=bool(context.get(communication_names)[kernels].any())
        or any(number in nccl_names for names in host for number in names.tolist()),
        tensor_devices=[
            gpu.device
            for gpu in gpus
            if gpu.kernels
            and gpu.tensor_cores == 0
            and major_capability(properties.get(gpu.device, {})) >= TENSOR_CORE_CAPABILITY
        ],
        peaks=[
            (gpu.device, gpu.peak_memory_bytes, gpu.memory_bytes)
            for gpu in gpus
            if gpu.peak_memory_bytes is not None and gpu.memory_bytes is not None
        ],
        advice={"tensor_cores": able.precision() or _ADVICE["tensor_cores"], "low_utilization": able.fewer_launches()},
    )


def capabilities(devices: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Returns the compute capability of each GPU whose properties state it."""
    known = {number: (item.get("computeMajor"), item.get("computeMinor")) for number, item in devices.items()}
    return {
        number: float(f"{major}.{minor}")
        for number, (major, minor) in known.items()
        if is_count(major) and is_count(minor)
    }


def major_capability(properties: Mapping[str, Any]) -> int:
    """Returns the major compute capability of a GPU; 0 if it is unknown."""
    found: Any = properties.get("computeMajor")
    return int(found) if is_count(found) else 0
