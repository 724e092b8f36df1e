"""What to change first: each finding with the time that it would give, and the evidence.

Theory of operation
    A finding is a cause of lost time that a person can do something about. Its saving is time (ns, over the whole
    window) that the trace shows to be lost to that cause: GPU idle time by cause (idle_gaps.py), communication and
    copies that no computation hides, and for kernels a part of their time that is stated with the finding, since what
    another kernel would take is not in the trace. Savings overlap: they do not add up.

    Each finder gives findings, or none. What saves less than LEAST of the window is left out. A process with several
    GPUs is judged by their mean.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.idle.idle_gaps import (
    COMMUNICATION,
    DATA_LOADING,
    HOST,
    MEMORY,
    SYNCHRONISATION,
    IdleGaps,
    idle_gaps,
)
from kineto_trace.analysis.kernels.launch_occupancy import launch_figures
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.arrays.row_groups import sums
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.tensor_cores import eligible_op_names, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, MEMCPY, calls, gpu, steps
from kineto_trace.structure.call_stacks import call_stacks

LEAST = 0.005  # of the window
SPEED_UP = 2.0  # of matrix products by tensor cores, at least: TF32 against FP32 on any GPU that has it
FUSED = 0.5  # of the time of elementwise kernels: a fused one reads and writes once what two read and write twice
SMALL_GRID_NS = 10_000  # shorter kernels are a matter of launches
TOP_KERNELS = 3
TOP_SYNCS = 3
_ELEMENTWISE = re.compile(r"elementwise_kernel|unrolled_elementwise|CatArrayBatchedCopy|index_elementwise")
_PAGEABLE = re.compile(r"Pageable", re.IGNORECASE)

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """saving_ns: over the window. op: row of cpu_op that shows it best, -1: none. kernels: names, the longest first."""

    name: str
    title: str
    saving_ns: int
    advice: str
    evidence: str
    op: int = -1
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceFindings:
    """The findings of a trace, the largest saving first; the window (ns) that they are of, and its steps (0: none)."""

    findings: tuple[Finding, ...]
    window_ns: int
    steps: int


def findings(context: Context) -> TraceFindings:
    """Returns all findings of one trace."""
    windows = context.get(idle_gaps).windows
    window = sum(windows.values()) // max(len(windows), 1)
    every = [finding for finder in FINDERS for finding in finder(context) if finding.saving_ns > LEAST * window]
    every.sort(key=lambda finding: -finding.saving_ns)
    return TraceFindings(tuple(every), window, len(context.get(steps)))


def _idle(gaps: IdleGaps, chosen: npt.NDArray[Any]) -> int:
    """The length (ns) of these gaps, per GPU."""
    return int(gaps.length[chosen].sum()) // max(len(gaps.windows), 1)


def _busy(context: Context, chosen: Flags) -> Union:
    activity = context.get(gpu)
    return union(activity.start[chosen], activity.end[chosen])


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def _longest(context: Context, chosen: Flags) -> tuple[str, ...]:
    """The names of the chosen GPU activities with the most time."""
    activity = context.get(gpu)
    total = sums(
        activity.name[chosen].astype(np.int64), (activity.end - activity.start)[chosen], len(context.trace.strings)
    )
    best = np.argsort(-total, kind="stable")[:TOP_KERNELS]
    return tuple(context.trace.strings[number] for number in best.tolist() if total[number] > 0)


def _op_name(context: Context, row: int) -> str:
    return context.trace.strings[int(context.trace.table("cpu_op")["name"][row])] if row >= 0 else ""


def host_bound(context: Context) -> Iterator[Finding]:
    """GPU idle because the host is busy with other things: the launch-bound case."""
    gaps = context.get(idle_gaps)
    chosen = gaps.cause == HOST
    saving = _idle(gaps, chosen)
    if not saving:
        return
    activity = context.get(gpu)
    kernels = activity.kind == KERNEL
    count = int(np.count_nonzero(kernels))
    mean = float((activity.end - activity.start)[kernels].mean()) if count else 0.0
    op = _heaviest_op(context, gaps.op[chosen], gaps.length[chosen])
    where = f", more in {_op_name(context, op)} than in any other operator" if op >= 0 else ""
    yield Finding(
        name="host_bound",
        title="The GPU waits for the host to launch work",
        saving_ns=saving,
        advice="Give the GPU more work per launch: torch.compile or CUDA graphs, a larger batch, fused optimizers "
        "(fused=True), fewer tiny operators and less Python between them.",
        evidence=f"{np.count_nonzero(chosen)} gaps, {_ms(saving)} idle{where}; {count} kernels of {mean / 1e3:.3g} us "
        "on average",
        op=op,
        kernels=_longest(context, kernels),
    )


def _heaviest_op(context: Context, rows: Ints, weights: Ints) -> int:
    """A row of the op name with the most weight: the row with the most of it. -1: no op."""
    known = rows >= 0
    if not known.any():
        return -1
    rows, weights = rows[known], weights[known]
    names = context.trace.table("cpu_op")["name"][rows]
    total = sums(names, weights, len(context.trace.strings))
    mine = names == int(np.argmax(total))
    return int(rows[mine][np.argmax(weights[mine])])


def synchronisation(context: Context) -> Iterator[Finding]:
    """Calls that wait for the GPU: it runs dry while the host comes back, one finding per operator that waits."""
    gaps, called = context.get(idle_gaps), context.get(calls)
    chosen = np.flatnonzero(gaps.cause == SYNCHRONISATION)
    if not len(chosen):
        return
    op_names = context.trace.table("cpu_op")["name"]
    rows = gaps.op[chosen]
    key = np.where(rows >= 0, op_names[rows] if len(op_names) else 0, -1).astype(np.int64)
    keys, place = np.unique(key, return_inverse=True)
    total = sums(place, gaps.length[chosen], len(keys))
    for number in np.argsort(-total, kind="stable")[:TOP_SYNCS].tolist():
        mine = chosen[place == number]
        op = _heaviest_op(context, gaps.op[mine], gaps.length[mine])
        call = context.trace.strings[int(called.name[gaps.blocking[mine[0]]])]
        what = _op_name(context, op) or call
        yield Finding(
            name="synchronisation",
            title=f"{what} waits for the GPU, which then waits for the host",
            saving_ns=_idle(gaps, mine),
            advice="Do not read results of the GPU in the loop (.item(), .cpu(), print, a condition on a tensor, "
            "nonzero): collect them on the GPU and read them every so many steps, or copy with non_blocking=True "
            "and wait later.",
            evidence=f"{call} {len(mine)} times, the GPU idle for {_ms(_idle(gaps, mine))} after it",
            op=op,
        )


def _waiting(context: Context, cause: int, name: str, title: str, advice: str) -> Iterator[Finding]:
    gaps = context.get(idle_gaps)
    chosen = gaps.cause == cause
    saving = _idle(gaps, chosen)
    if saving:
        yield Finding(
            name=name,
            title=title,
            saving_ns=saving,
            advice=advice,
            evidence=f"{np.count_nonzero(chosen)} gaps, {_ms(saving)} idle, the longest "
            f"{_ms(float(gaps.length[chosen].max()))}",
            op=_heaviest_op(context, gaps.op[chosen], gaps.length[chosen]),
        )


def data_loading(context: Context) -> Iterator[Finding]:
    """GPU idle while the host waits for the next batch."""
    yield from _waiting(
        context,
        DATA_LOADING,
        "data_loading",
        "The GPU waits for the next batch",
        "Load in parallel and ahead: DataLoader with more num_workers, persistent_workers, prefetch_factor and "
        "pin_memory; move decoding and augmentation to the workers or the GPU.",
    )


def waiting_for_ranks(context: Context) -> Iterator[Finding]:
    """GPU idle while the host waits in a collective."""
    yield from _waiting(
        context,
        COMMUNICATION,
        "communication_on_the_host",
        "The GPU waits for a collective of the host",
        "Use the NCCL backend for tensors on the GPU, and keep barriers and object collectives out of the loop.",
    )


def allocation(context: Context) -> Iterator[Finding]:
    """GPU idle while CUDA allocates or releases memory."""
    yield from _waiting(
        context,
        MEMORY,
        "allocation",
        "The GPU waits while memory is allocated or released",
        "Keep the allocator from going back to CUDA: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no "
        "torch.cuda.empty_cache() in the loop, less peak memory; allocate pinned buffers once.",
    )


def exposed_communication(context: Context) -> Iterator[Finding]:
    """Collectives on the GPU that no computation hides."""
    activity = context.get(gpu)
    if not activity.communication.any():
        return
    communication = _busy(context, activity.communication)
    exposed = difference(communication, _busy(context, (activity.kind == KERNEL) & ~activity.communication)).length()
    yield Finding(
        name="exposed_communication",
        title="Communication is not hidden behind computation",
        saving_ns=exposed,
        advice="Overlap it: larger or better ordered gradient buckets, gradient accumulation with no_sync(), "
        "prefetching of sharded parameters, reduced precision for gradients; look for late ranks with the views "
        "collectives and stragglers.",
        evidence=f"{_ms(communication.length())} of collectives, {_share(exposed, communication.length())} of it while "
        "the GPU computes nothing",
        kernels=_longest(context, activity.communication),
    )


def exposed_pageable_copies(context: Context) -> Iterator[Finding]:
    """Copies from or to memory that is not pinned, which no computation hides."""
    activity = context.get(gpu)
    pageable = (activity.kind == MEMCPY) & matches(context.trace.strings, _PAGEABLE)[activity.name]
    if not pageable.any():
        return
    copies = _busy(context, pageable)
    exposed = difference(copies, _busy(context, activity.kind == KERNEL)).length()
    yield Finding(
        name="pageable_copies",
        title="Copies from or to pageable memory keep the GPU waiting",
        saving_ns=exposed,
        advice="Pin host memory (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with non_blocking=True.",
        evidence=f"{np.count_nonzero(pageable)} copies, {_ms(copies.length())}, of that {_ms(exposed)} while the GPU "
        "computes nothing",
        kernels=_longest(context, pageable),
    )


def no_tensor_cores(context: Context) -> Iterator[Finding]:
    """Matrix products on ordinary cores, on a GPU that has tensor cores."""
    capable = [item for item in context.trace.devices if int(item.get("computeMajor", 0)) >= 7]
    if not capable:
        return
    activity = context.get(gpu)
    ops = context.trace.table("cpu_op")
    eligible = np.zeros(len(activity), np.bool_)
    known = activity.op >= 0
    eligible[known] = context.get(eligible_op_names)[ops["name"][activity.op[known]]]
    chosen = eligible & (activity.kind == KERNEL) & ~context.get(uses_tensor_cores)[activity.name]
    took = (activity.end - activity.start)[chosen]
    if not len(took):
        return
    everything = int((activity.end - activity.start)[activity.kind == KERNEL].sum())
    yield Finding(
        name="no_tensor_cores",
        title="Matrix products do not use the tensor cores",
        saving_ns=int(took.sum() * (1 - 1 / SPEED_UP)),
        advice="Use bfloat16 or float16 (torch.autocast), or TF32 for float32 "
        "(torch.set_float32_matmul_precision('high')); sizes should be multiples of 8.",
        evidence=f"{_ms(float(took.sum()))} of kernels, {_share(float(took.sum()), everything)} of all kernel "
        f"time; the saving assumes {SPEED_UP:g} times the speed",
        op=_heaviest_op(context, activity.op[chosen], took),
        kernels=_longest(context, chosen),
    )


def elementwise(context: Context) -> Iterator[Finding]:
    """Elementwise kernels, which move memory most of all, and could be fused."""
    activity = context.get(gpu)
    chosen = (activity.kind == KERNEL) & matches(context.trace.strings, _ELEMENTWISE)[activity.name]
    took = (activity.end - activity.start)[chosen]
    if not len(took):
        return
    yield Finding(
        name="elementwise",
        title="Many elementwise kernels that could be fused",
        saving_ns=int(took.sum() * FUSED),
        advice="torch.compile fuses them; else use fused operators (fused optimizers, F.scaled_dot_product_attention, "
        "fused norms and activations).",
        evidence=f"{len(took)} kernels, {_ms(float(took.sum()))}; the saving assumes that half of it goes",
        op=_heaviest_op(context, activity.op[chosen], took),
        kernels=_longest(context, chosen),
    )


def small_grids(context: Context) -> Iterator[Finding]:
    """Kernels with fewer blocks than the GPU has multiprocessors, so that a part of it has nothing to do."""
    kernel = context.trace.table("kernel")
    per_sm = context.get(launch_figures).blocks_per_sm
    activity = context.get(gpu)
    rows = np.flatnonzero((activity.kind == KERNEL) & ~activity.communication)
    filled = per_sm[activity.row[rows]]
    duration = kernel["duration"][activity.row[rows]]
    small = (filled > 0) & (filled < 1) & (duration >= SMALL_GRID_NS)
    if not small.any():
        return
    chosen = np.zeros(len(activity), np.bool_)
    chosen[rows[small]] = True
    yield Finding(
        name="small_grids",
        title="Kernels leave a part of the GPU without work",
        saving_ns=int((duration[small] * (1 - filled[small])).sum()),
        advice="Make the work of these operators larger (batch, sequence, fused heads), or run independent ones on "
        "streams of their own.",
        evidence=f"{np.count_nonzero(small)} kernels of {_ms(float(duration[small].sum()))} with "
        f"{float(np.average(filled[small], weights=duration[small])):.2g} blocks per multiprocessor; the saving "
        "is what a full GPU would give at most",
        op=_heaviest_op(context, activity.op[rows[small]], duration[small]),
        kernels=_longest(context, chosen),
    )


FINDERS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    host_bound,
    synchronisation,
    data_loading,
    waiting_for_ranks,
    allocation,
    exposed_communication,
    exposed_pageable_copies,
    no_tensor_cores,
    elementwise,
    small_grids,
)


def stack_of(context: Context, row: int) -> str | None:
    """Returns the Python frames around an op, innermost first; None if they were not recorded."""
    stacks = context.get(call_stacks)
    return stacks.text(context.trace, int(stacks.of_op[row])) if row >= 0 else None
