"""Findings that only hardware counters tell: what bounds the GPU's work, and clocks that are held down.

What it would save is a guess each time. Kernels that another finding judges by other means are left to it.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import time_causes
from kineto_trace.analysis.counters.clock_views import (
    OWN_POWER,
    mean_in,
    slowed_by_sampling,
    sm_clock,
    throttled,
    throttling,
)
from kineto_trace.analysis.counters.roofline import (
    BOUND,
    COMPUTE_BOUND,
    LATENCY_BOUND,
    MEMORY_BOUND,
    VERDICTS,
    activity_use,
    activity_verdicts,
)
from kineto_trace.analysis.counters.sampled_counters import POWER, POWER_LIMIT, sampled_counters, tracks_of
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.gpu_abilities import BFLOAT16, FLOAT8, gpu_abilities
from kineto_trace.analysis.findings.gpu_work_findings import COMPUTING
from kineto_trace.analysis.findings.kernel_findings import elementwise_kernels, mean_use
from kineto_trace.analysis.findings.measured_work import heaviest_op, longest, measured_times
from kineto_trace.analysis.kernels.precision_views import activity_precisions
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.base.quantities import ms, share, times
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.precisions import BITS, PRECISIONS, UNKNOWN
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu

HALF = 0.5  # of the bytes, or of the time with twice the peak
SLOWER = 0.98  # of the largest clock: what is above is no loss that anybody would see
_REMEDIES = {
    "power": "Raise the limit if it is below what the GPU allows (nvidia-smi -q -d POWER; nvidia-smi -pl), or accept "
    "it: at its highest limit a GPU lowers its clock under heavy products. Work that is bound by memory loses little.",
    "heat": "Cool the GPU better: look at fans, at the temperature of the air and at its neighbours.",
    "hardware": "Look at the power supply and its cables, and at the driver's log (nvidia-smi -q -d PERFORMANCE): the "
    "board itself asked for a lower clock.",
}

Flags = npt.NDArray[np.bool_]


def memory_bound(context: Context) -> Iterator[Finding]:
    """Kernels other than elementwise ones that use the memory as well as they can."""
    chosen = _judged(context, MEMORY_BOUND) & ~context.get(elementwise_kernels)
    if not chosen.any():
        return
    time = _time(context, chosen)
    yield _finding(
        context,
        chosen,
        name="memory_bound",
        title="Kernels are bound by the GPU's memory",
        saving=time * HALF,
        advice="They move memory about as fast as the GPU can, so only fewer bytes make them faster: fuse them with "
        "what runs before and after (torch.compile, fused norms and losses), use types of 16 bits or less, and leave "
        "out copies such as .contiguous() and .clone().",
        use=f"measured at {mean_use(context, 'dram', chosen):.3g} % of DRAM's peak; the saving assumes half of the "
        "bytes",
    )


def compute_bound(context: Context) -> Iterator[Finding]:
    """Products that use the tensor pipe as well as they can, where a narrower type would be faster."""
    able = context.get(gpu_abilities)
    bits = np.array([*BITS.values(), 0])[context.get(activity_precisions)]  # the last one is for UNKNOWN
    assert UNKNOWN == -1 and len(PRECISIONS) == len(BITS)
    if able.vendor not in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN) or able.capability is None:
        return
    narrower = (bits == BITS["tf32"]) & (able.capability >= BFLOAT16)
    narrower |= (bits == BITS["bf16"]) & (able.capability >= FLOAT8)
    chosen = _judged(context, COMPUTE_BOUND) & narrower & (context.get(activity_use)["tensor"] >= BOUND)
    if not chosen.any():
        return
    took = context.get(measured_times)
    wide = int(took[chosen & (bits == BITS["tf32"])].sum()) > HALF * int(took[chosen].sum())
    advice = able.precision() if wide else "float8 for the largest products (torchao, Transformer Engine)."
    yield _finding(
        context,
        chosen,
        name="compute_bound",
        title=f"Matrix products are bound by the {able.words.tensor_cores}",
        saving=_time(context, chosen) * HALF,
        advice=f"They run about as fast as their precision allows, and a narrower one has twice the peak: {advice} "
        "Otherwise only fewer operations help.",
        use=f"measured at {mean_use(context, 'tensor', chosen):.3g} % of the tensor pipe and "
        f"{mean_use(context, 'dram', chosen):.3g} % of DRAM's peak; the saving assumes a type of half the width, which "
        "not every model bears",
    )


def latency_bound(context: Context) -> Iterator[Finding]:
    """Kernels that use neither memory nor arithmetic well, though multiprocessors have work."""
    use = context.get(activity_use)
    chosen = _judged(context, LATENCY_BOUND) & ~(use["sm_busy"] < BOUND) & ~context.get(elementwise_kernels)
    if not chosen.any():
        return
    used = np.fmax(use["dram"], np.fmax(use["tensor"], use["cores"]))[chosen]
    took = context.get(measured_times)[chosen]
    devices = max(len(context.get(time_causes).devices), 1)
    yield _finding(
        context,
        chosen,
        name="latency_bound",
        title="Kernels wait for latency: they use neither the memory nor the arithmetic units well",
        saving=float((took * (1 - used / BOUND)).sum()) / devices,
        advice="Give each of them more independent work: larger batches or sequences, fused operators (torch.compile, "
        "F.scaled_dot_product_attention), sizes that are multiples of 8 or 64, contiguous inputs. A kernel of your "
        "own may need more warps, or more loads in flight.",
        use=f"measured at {float(np.average(used, weights=took)):.3g} % of the peak of the unit that they use most; "
        f"the saving assumes {BOUND:g} %",
    )


def _judged(context: Context, verdict: str) -> Flags:
    """Kernels in measured steps with this verdict."""
    activity, found = context.get(gpu), context.get(activity_verdicts) == VERDICTS.index(verdict)
    chosen: Flags = found & (activity.kind == KERNEL) & ~activity.communication & (context.get(measured_times) > 0)
    return chosen


def _time(context: Context, chosen: Flags) -> int:
    return int(context.get(measured_times)[chosen].sum()) // max(len(context.get(time_causes).devices), 1)


def _finding(
    context: Context, chosen: Flags, *, name: str, title: str, saving: float, advice: str, use: str
) -> Finding:
    activity, took = context.get(gpu), context.get(measured_times)
    time = int(took[chosen].sum())
    return Finding(
        name=name,
        title=title,
        saving_ns=int(saving),
        advice=advice,
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')} of {ms(time)}, {share(time, int(took.sum()))} of "
        f"the GPU's work, {use}",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest(context, chosen),
    )


def throttled_clock(context: Context) -> Iterator[Finding]:
    """Steps during which power, heat or the hardware held the clock of the GPU down."""
    steps = context.get(time_causes).steps
    measured = union(steps.start[~steps.left_out], steps.end[~steps.left_out])
    lost: dict[str, list[tuple[float, str]]] = {}
    sampling = False
    for device in sorted({track.device for track in context.get(sampled_counters)}):
        slow, clock = intersection(throttled(context, device), measured), sm_clock(context, device)
        if not slow.length() or clock is None or not len(clock):
            continue
        at, top = mean_in(clock, slow), float(clock.value.max())
        if not at < SLOWER * top:
            continue
        reasons = [(intersection(each.spans, measured).length(), each.reason) for each in throttling(context, device)]
        told = (
            f"GPU {device}: throttled by {max(reasons)[1]} for {share(slow.length(), measured.length())} of the steps' "
        )
        told += f"time at {at / 1e9:.3g} of {top / 1e9:.3g} GHz{_power(context, device, slow)}"
        sampling |= slowed_by_sampling(context, device)
        lost.setdefault(max(reasons)[1], []).append((_busy(context, device, slow) * (1 - at / top), told))
    devices = max(len(context.get(time_causes).devices), 1)
    for reason, found in lost.items():
        yield Finding(
            name="throttled_clock",
            title=f"The clock of the GPU is held down by its {'temperature' if reason == 'heat' else reason}",
            saving_ns=int(sum(saving for saving, _ in found)) // devices,
            advice=_REMEDIES[reason],
            evidence=f"{'; '.join(text for _, text in found)}; the saving assumes that all work follows the clock"
            + (f"; {OWN_POWER}" if sampling and reason == "power" else ""),
        )


def _busy(context: Context, device: int, slow: Union) -> int:
    """How long the GPU had work in these spans, in ns."""
    activity = context.get(gpu)
    own = activity.device == device
    return intersection(union(activity.start[own], activity.end[own]), slow).length()


def _power(context: Context, device: int, slow: Union) -> str:
    found = tracks_of(context, device)
    power, limit = (mean_in(found.get(label), slow) for label in (POWER, POWER_LIMIT))
    return "" if np.isnan(power) else f", {power:.0f} W" + ("" if np.isnan(limit) else f" of {limit:.0f} W")
