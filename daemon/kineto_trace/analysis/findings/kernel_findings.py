"""Findings about kernels, by their names, launch shapes and hardware counters.

Theory of operation
    Names, shapes and grids only estimate how a kernel uses the GPU. Counters take precedence where they have a value: a
    kernel that uses the tensor pipe is not reported as lacking it, and the busy multiprocessors, not the grid, show how
    full the GPU is.

Some findings need hardware counters: what limits the GPU's work, and clocks that are held down.

Their savings are guesses. Kernels that another finding judges by other means are left to it.
"""

import re
from collections.abc import Iterator

import numpy as np

from kineto_trace.analysis.cause_views import ELEMENTWISE, GPU_CAUSES, gpu_causes, time_causes
from kineto_trace.analysis.counters.roofline import (
    BOUND,
    COMPUTE_BOUND,
    LATENCY_BOUND,
    MEMORY_BOUND,
    OWN_POWER,
    PIPE_USED,
    VERDICTS,
    activity_use,
    activity_verdicts,
    mean_in,
    slowed_by_sampling,
    sm_clock,
    throttled,
    throttling,
)
from kineto_trace.analysis.counters.sampled_counters import POWER, POWER_LIMIT, sampled_counters, tracks_of
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.common_findings import heaviest_op, longest_names, measured_times
from kineto_trace.analysis.findings.gpu_work_findings import COMPUTING, double_kernels
from kineto_trace.analysis.kernels.precision_views import activity_precisions, launch_figures
from kineto_trace.analysis.overview.gpu_figures import BFLOAT16, FLOAT8, gpu_abilities
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.base.array_types import Flags, Floats, Ints
from kineto_trace.base.quantities import format_duration, share, times
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.precisions import (
    BITS,
    PRECISIONS,
    UNKNOWN,
    eligible_op_names,
    no_tensor_core_gain,
    uses_tensor_cores,
)
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, captured_ops, gpu, owners, vendor_words

SPEED_UP = 4.0  # of matrix products by tensor cores: half the ratio of the GPUs' peaks
FUSED = 0.5  # of the time of elementwise kernels: a fused one reads and writes once where two read and write twice
FUSED_KERNELS = re.compile(r"^triton_poi_|Fused\w{0,200}(?:Optimizer|Adam|Adagrad|Sgd|SGD)")
SMALL_GRID_NS = 10_000  # below this, the launch matters rather than the kernel
MOSTLY = 0.5  # of the time of kernels: measurements that cover this much represent them all
HALF = 0.5  # of the bytes, or of the time with twice the peak
SLOWER = 0.98  # of the largest clock: above this the loss is negligible
_REMEDIES = {
    "power": "Raise the power limit if it is below the GPU's maximum (nvidia-smi -q -d POWER; nvidia-smi -pl), or "
    "accept the lower clock: even at the maximum, a GPU lowers it under heavy matrix products. Memory-bound work "
    "loses little.",
    "heat": "Cool the GPU better: check the fans, the air temperature and the neighbouring devices.",
    "hardware": "Check the power supply and its cables, and what the driver reports (nvidia-smi -q -d PERFORMANCE): "
    "the board itself requested a lower clock.",
}


def mean_use(context: Context, unit: str, chosen: Flags) -> float:
    """Returns the mean use (%) of a unit (a field of UnitUse) by these activities; NaN if most of it is unknown."""
    value, took = context.get(activity_use)[unit][chosen], context.get(measured_times)[chosen]
    known = ~np.isnan(value)
    if int(took[known].sum()) <= MOSTLY * int(took.sum()):
        return float("nan")
    return float(np.average(value[known], weights=took[known]))


def no_tensor_cores(context: Context) -> Iterator[Finding]:
    """Yields matrix products on ordinary cores, on a GPU that has tensor cores."""
    able = context.get(gpu_abilities)
    if not able.tensor_cores:
        return
    activity, owner, found = context.get(gpu), context.get(owners), context.get(time_causes)
    eligible = np.zeros(len(activity), np.bool_)
    known = (activity.op >= 0) | (context.get(captured_ops) >= 0)
    eligible[known] = context.get(eligible_op_names)[owner[known]]
    kernels = activity.kind == KERNEL
    products = context.get(gpu_causes) == GPU_CAUSES.index("matrix_products")
    chosen = eligible & kernels & products & ~context.get(uses_tensor_cores)[activity.name]
    chosen &= ~context.get(no_tensor_core_gain)[activity.name]
    chosen &= ~(context.get(activity_use)["tensor"] >= PIPE_USED)
    took = context.get(measured_times)
    total, everything = int(took[chosen].sum()), int(took[kernels].sum())
    if not total:
        return
    pipe = mean_use(context, "tensor", chosen)
    measured = "" if np.isnan(pipe) else f"; they used {pipe:.2g} % of the tensor pipe's peak"
    yield Finding(
        name="no_tensor_cores",
        title=f"Matrix products do not use the {able.words.tensor_cores}",
        saving_ns=int(total * (1 - 1 / SPEED_UP)) // len(found.devices),
        advice=able.precision(),
        evidence=f"kernels taking {format_duration(total)}, {share(total, everything)} of all kernel time; the saving "
        f"assumes {SPEED_UP:g} times the speed{measured}",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def elementwise(context: Context) -> Iterator[Finding]:
    """Yields elementwise kernels that could be fused, which mainly move memory.

    Without those that are fused already: torch.compile's own, and those of fused optimizers. Kernels in float64 have a
        finding on their type, which is to be changed first.
    """
    activity, took = context.get(gpu), context.get(measured_times)
    every = context.get(elementwise_kernels) & (took > 0)
    unfused = every & ~matches(context.trace.strings, FUSED_KERNELS)[activity.name]
    chosen = unfused & ~context.get(double_kernels)
    double = int(took[unfused & ~chosen].sum()) // max(len(context.get(time_causes).devices), 1)
    apart = f"; others taking {format_duration(double)} compute in float64 (a separate finding)" if double else ""
    total = context.get(time_causes).total("elementwise")
    time = int(total * (int(took[chosen].sum()) / max(int(took[every].sum()), 1)))
    if not time:
        return
    yield Finding(
        name="elementwise",
        title="Many elementwise kernels could be fused",
        saving_ns=int(time * FUSED),
        advice=context.get(gpu_abilities).fusing(),
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')} taking {format_duration(time)}; the saving assumes "
        f"half of that{apart}{_memory_use(context, chosen)}",
        causes=("elementwise",),
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def elementwise_kernels(context: Context) -> Flags:
    """Returns for each GPU activity whether it is an elementwise kernel, by its name."""
    activity = context.get(gpu)
    found: Flags = (activity.kind == KERNEL) & matches(context.trace.strings, ELEMENTWISE)[activity.name]
    return found


def _memory_use(context: Context, chosen: Flags) -> str:
    """Returns a text on how much of the memory's peak these kernels used, and what limits most of them; "" if
    unknown.
    """
    dram, took = mean_use(context, "dram", chosen), context.get(measured_times)
    if np.isnan(dram):
        return ""
    verdict = context.get(activity_verdicts)
    most = {name: int(took[chosen & (verdict == VERDICTS.index(name))].sum()) for name in (MEMORY_BOUND, LATENCY_BOUND)}
    name = next((name for name, time in most.items() if time > MOSTLY * int(took[chosen].sum())), "")
    bound = f": {name}" if name else ""
    whole = share(int(took[chosen].sum()), int(took.sum()))
    return f"; {whole} of the GPU's work, measured at {dram:.3g} % of DRAM's peak{bound}"


def small_grids(context: Context) -> Iterator[Finding]:
    """Yields kernels with fewer blocks than the GPU has multiprocessors, so that a part of it has nothing to do.

    If counters show how busy the multiprocessors were, that counts instead of the blocks; kernels that use the memory
    or arithmetic units well are left out.
    """
    per_sm, activity = context.get(launch_figures).blocks_per_sm, context.get(gpu)
    took = context.get(measured_times)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication & (took >= SMALL_GRID_NS))
    blocks, busy = per_sm[activity.row[rows]], context.get(activity_use)["sm_busy"][rows]
    measured = ~np.isnan(busy)
    verdict = context.get(activity_verdicts)[rows]
    well = np.isin(verdict, [VERDICTS.index(name) for name in (MEMORY_BOUND, COMPUTE_BOUND)])
    small = np.where(measured, busy < BOUND, (blocks > 0) & (blocks < 1)) & ~well
    if not small.any():
        return
    rows, blocks, busy, measured = rows[small], blocks[small], busy[small], measured[small]
    filled = np.where(measured, busy / 100, blocks)
    chosen = np.zeros(len(activity), np.bool_)
    chosen[rows] = True
    devices = max(len(context.get(time_causes).devices), 1)
    yield Finding(
        name="small_grids",
        title="Kernels leave part of the GPU idle",
        saving_ns=int((took[rows] * (1 - filled)).sum()) // devices,
        advice="Give these operators more work (a larger batch, longer sequences, fused heads), or run independent "
        "ones on separate streams.",
        evidence=f"{times(len(rows), 'kernel')} taking {format_duration(float(took[rows].sum()))}, "
        f"{_filled(blocks, busy, took[rows], vendor_words(context).multiprocessor)}; the saving "
        "is an upper bound: it assumes that they fill the GPU",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[rows], took[rows]),
        kernels=longest_names(context, chosen),
    )


def _filled(blocks: Floats, busy: Floats, took: Ints, multiprocessor: str) -> str:
    """Returns a text on how full the GPU was: by measurement, by the blocks, or by both."""
    told = []
    for value, text in (
        (blocks, f"with {{:.2g}} blocks per {multiprocessor}"),
        (busy, f"each {multiprocessor} busy for {{:.3g}} % of the time (measured)"),
    ):
        known = ~np.isnan(value)
        if known.any():
            told.append(text.format(float(np.average(value[known], weights=took[known]))))
    return ", ".join(told)


def memory_bound(context: Context) -> Iterator[Finding]:
    """Yields kernels other than elementwise ones that use the memory as well as they can."""
    chosen = _judged(context, MEMORY_BOUND) & ~context.get(elementwise_kernels)
    if not chosen.any():
        return
    time = _time(context, chosen)
    yield _finding(
        context,
        chosen,
        name="memory_bound",
        title="Kernels are bound by the GPU's memory bandwidth",
        saving=time * HALF,
        advice="Fuse them with what runs before and after (torch.compile, fused norms and losses), use types of 16 "
        "bits or fewer, and avoid copies such as .contiguous() and .clone(). They move data about as fast as the GPU "
        "can, so only moving fewer bytes makes them faster.",
        use=f"measured at {mean_use(context, 'dram', chosen):.3g} % of DRAM's peak; the saving assumes half the bytes",
    )


def compute_bound(context: Context) -> Iterator[Finding]:
    """Yields products that use the tensor pipe as well as they can, where a narrower type would be faster."""
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
    advice = able.precision() if wide else "Use float8 for the largest products (torchao, Transformer Engine)."
    yield _finding(
        context,
        chosen,
        name="compute_bound",
        title=f"Matrix products are bound by the {able.words.tensor_cores}",
        saving=_time(context, chosen) * HALF,
        advice=f"{advice} They run about as fast as their precision allows, and a narrower type has twice the peak; "
        "otherwise, only fewer operations help.",
        use=f"measured at {mean_use(context, 'tensor', chosen):.3g} % of the tensor pipe's peak and "
        f"{mean_use(context, 'dram', chosen):.3g} % of DRAM's peak; the saving assumes a data type half as wide, which "
        "not every model tolerates",
    )


def latency_bound(context: Context) -> Iterator[Finding]:
    """Yields kernels that use neither memory nor arithmetic well, though multiprocessors have work."""
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
        title="Kernels are bound by latency: they use neither the memory nor the arithmetic units well",
        saving=float((took * (1 - used / BOUND)).sum()) / devices,
        advice="Give each of them more independent work: larger batches or longer sequences, fused operators "
        "(torch.compile, F.scaled_dot_product_attention), sizes that are multiples of 8 or 64, contiguous inputs. A "
        "kernel of your own may need more warps, or more loads in flight.",
        use=f"measured at {float(np.average(used, weights=took)):.3g} % of the peak of the unit that they use most; "
        f"the saving assumes {BOUND:g} %",
    )


def _judged(context: Context, verdict: str) -> Flags:
    """Returns the kernels in measured steps with this verdict."""
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
        evidence=f"{times(int(np.count_nonzero(chosen)), 'kernel')} taking {format_duration(time)}, "
        f"{share(time, int(took.sum()))} of the GPU's work, {use}",
        causes=COMPUTING,
        op=heaviest_op(context, activity.op[chosen], took[chosen]),
        kernels=longest_names(context, chosen),
    )


def throttled_clock(context: Context) -> Iterator[Finding]:
    """Yields steps during which power, heat or the hardware held the clock of the GPU down."""
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
        told += f"time, to {at / 1e9:.3g} of {top / 1e9:.3g} GHz{_power(context, device, slow)}"
        sampling |= slowed_by_sampling(context, device)
        lost.setdefault(max(reasons)[1], []).append((_busy(context, device, slow) * (1 - at / top), told))
    devices = max(len(context.get(time_causes).devices), 1)
    for reason, found in lost.items():
        yield Finding(
            name="throttled_clock",
            title=f"The GPU's clock is held down by {'the hardware' if reason == 'hardware' else reason}",
            saving_ns=int(sum(saving for saving, _ in found)) // devices,
            advice=_REMEDIES[reason],
            evidence=f"{'; '.join(text for _, text in found)}; the saving assumes that all work scales with the clock"
            + (f"; {OWN_POWER}" if sampling and reason == "power" else ""),
        )


def _busy(context: Context, device: int, slow: Union) -> int:
    """Returns how long (ns) the GPU had work in these spans."""
    activity = context.get(gpu)
    own = activity.device == device
    return intersection(union(activity.start[own], activity.end[own]), slow).length()


def _power(context: Context, device: int, slow: Union) -> str:
    found = tracks_of(context, device)
    power, limit = (mean_in(found.get(label), slow) for label in (POWER, POWER_LIMIT))
    return "" if np.isnan(power) else f", {power:.0f} W" + ("" if np.isnan(limit) else f" of {limit:.0f} W")
