"""Where every nanosecond of the steps goes: for each GPU one cause at each moment, so that they sum to the whole.

Theory of operation
    While the GPU has work, the most useful kind of it counts (GPU_CAUSES, in this order): communication and copies thus
    count only where no computation hides them. On one rank a collective's waiting for other ranks cannot be separated
    from its transfer. Time without a recording of the GPU's activities is unknown. While the GPU is idle, the activity
    of the host counts (idle_pieces.py).

    Both together tile the window of each GPU without holes or overlaps. The steps are cut out of it.

The ranges over which figures are averaged: complete steps that show the pace, or the window without warm-up.
    structure/step_pace.py has the rules by which first steps are left out.

    A trace without complete steps has one range, the whole window. There, a gap of a GPU (the time before its first
    activity too) of at least 100 ms that takes more than a quarter of the window, in the first half of the GPU's
    activities and longer than all gaps after these together, is a one-time event, such as initialising CUDA or loading
    modules: the window up to its end is warm-up, and the rest is searched in the same way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.idle_gaps import IdleGaps, idle_gaps, idle_window
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES, PAGEABLE, idle_pieces
from kineto_trace.arrays.intervals import Union, active_sets, cut, intersection, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Ints, UInts8
from kineto_trace.base.quantities import format_duration
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.precisions import uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import KERNEL, MEMCPY, gpu, whole_steps
from kineto_trace.structure.nesting import unrecorded
from kineto_trace.structure.step_pace import StepPace, step_pace

GPU_CAUSES = (
    "matrix_products", "elementwise", "other_kernels", "communication", "pageable_copies", "pinned_copies",
    "device_copies", "other_copies", "fills", "unrecorded",
)  # fmt: skip
UNRECORDED = GPU_CAUSES.index("unrecorded")
CAUSES = (*GPU_CAUSES, *IDLE_CAUSES)
TITLES: Mapping[str, str] = {
    "matrix_products": "GPU computes: matrix products, convolutions, attention",
    "elementwise": "GPU computes: elementwise kernels",
    "other_kernels": "GPU computes: other kernels",
    "communication": "communication on the GPU that no computation hides (transfer, or waiting for other ranks)",
    "pageable_copies": "copies from or to pageable memory, while no kernel runs",
    "pinned_copies": "copies from or to pinned memory, while no kernel runs",
    "device_copies": "copies on or between GPUs, while no kernel runs",
    "other_copies": "copies whose kind of memory is not in the trace, while no kernel runs",
    "fills": "memory fills, while nothing else runs",
    "unrecorded": "the GPU's activities were not recorded",
    "data_loading": "GPU idle: the host waits for the next batch, or makes it",
    "host_communication": "GPU idle: the host waits in a collective",
    "allocation": "GPU idle: the runtime allocates or releases memory",
    "synchronisation": "GPU idle: the host had waited for the GPU, and comes back with work",
    "operators": "GPU idle: the host is in operators and launching calls",
    "python": "GPU idle: the host runs Python outside of operators",
    "gil": "GPU idle: the host waits for Python's global lock (GIL)",
    "blocked": "GPU idle: the host is off the CPU in Python; sleep, lock or I/O",
    "lock": "GPU idle: the host waits for a lock, a queue or another thread",
    "sleep": "GPU idle: the host sleeps",
    "input_output": "GPU idle: the host reads, writes or waits for a file, socket or process",
    "garbage_collection": "GPU idle: the host collects garbage",
    "logging": "GPU idle: the host prints or logs",
    "staging": "GPU idle: the host is in the call of a copy from or to pageable memory, or releases that memory",
    "annotation": "GPU idle: the host is in an annotated range, outside of operators",
    "launch_latency": "GPU idle: from the launching call to the start of its work",
    "kernel_gaps": "GPU idle: short gaps between activities that were launched ahead",
    "queued": "GPU idle: launched work waits in its queue, for an event, another stream or the launch",
    "unknown": "GPU idle: the trace does not tell why",
}
_MATRIX = re.compile(
    r"(?<!fb)gemm|gemv|Gemm|wgrad|dgrad|fprop|convolve|conv\d?d|Conv(?!ert)|winograd|implicit|fft2d|[shi]cudnn_"
    r"|cudnn.{0,500}(?:ampere|volta|hopper)|attention|[fF]mha|flash_|(?:attn|sage)_[fb]wd|cutlass|nvjet|Cijk_|dot_kernel|splitK"
    r"|matmul|^bmm_|gen\d*_conv|_convolution|sdpa|xetla"
)  # excludes FBGEMM's kernels for embeddings, which have its name
_NO_MATRIX = re.compile(
    r"[eE]lementwise|conv_reorder|batch_?norm|layer_?norm|compute\w{0,100}Offsets|nchwToNhwc|nhwcToNchw|softmax|pool|[Ii]m2(?:d2)?[Cc]ol"
    r"|reshape_and_cache|finalize_matmul|triton_(?:poi|per|red)_"
)
ELEMENTWISE = re.compile(
    r"elementwise_kernel|CatArrayBatchedCopy|index_elementwise|multi_tensor_apply|triton_poi_"
    r"|xpu::\w*(?:Elementwise\w*Kernel|MultiTensorApply)"
)
_PINNED = re.compile(r"Pinned", re.IGNORECASE)
_ON_DEVICE = re.compile(r"DtoD|PtoP|Device -> Device|DeviceToDevice|PeerToPeer", re.IGNORECASE)
_FIRST = np.array([(mask & -mask).bit_length() - 1 for mask in range(1 << len(GPU_CAUSES))])  # lowest bit of a mask
ONCE_SHARE = 0.25  # of the window
ONCE_NS = 100_000_000
MIN_ACTIVITIES = 3  # after warm-up: fewer do not show how the program goes on


class Detail(NamedTuple):
    """A part of a cause.

    name: number into Trace.strings, or NOTHING.
    line: executing line of a Python function, or 0.
    frame: row of python_function, or NOTHING.
    reason: number into REASONS of idle_pieces.
    """

    device: int
    cause: int
    name: int
    line: int
    frame: int
    reason: int
    time_ns: int
    pieces: int


class _Tiles(NamedTuple):
    """Causes of a GPU's time, without holes: from each start to the next one. piece: place in IdlePieces."""

    start: Ints
    end: Ints
    cause: Ints
    piece: Ints


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Ranges (Unix ns) in order.

    number: of the step; -1 if the trace has no complete one.
    left_out: not in means and savings.
    pace: of the steps; None without steps.
    """

    number: Ints
    start: Ints
    end: Ints
    left_out: Flags
    pace: StepPace | None = None

    @property
    def length(self) -> Ints:
        """Returns the length of each range, in ns."""
        return self.end - self.start

    @property
    def measured_ns(self) -> int:
        """Returns the length (ns) of all ranges but those that are left out."""
        return int(self.length[~self.left_out].sum())

    @property
    def steps(self) -> int:
        """Returns how many steps are measured; 0 if the trace has no complete one."""
        return int(np.count_nonzero(~self.left_out & (self.number >= 0)))

    def note(self) -> str | None:
        """Returns a note on what is left out; None if nothing is."""
        if self.pace is not None:
            return self.pace.note()
        if not self.length[self.left_out].any():
            return None
        took = format_duration(int(self.length[self.left_out].sum()))
        return f"the first {took}, up to the end of a gap that does not recur, are warm-up and left out"


@dataclass(frozen=True, slots=True)
class TimeCauses:
    """time_ns: [device, cause, step], by the places in `devices`, CAUSES and the ranges of `steps`.

    details: parts of the time of measured steps, largest first; without names of kernels.
    """

    steps: MeasuredSteps
    devices: tuple[int, ...]
    time_ns: Ints
    details: tuple[Detail, ...]

    def measured(self) -> Ints:
        """Returns the time of the measured steps: [device, cause], in ns."""
        found: Ints = self.time_ns[:, :, ~self.steps.left_out].sum(axis=2)
        return found

    def total(self, *causes: str) -> int:
        """Returns the time of these causes in the measured steps, as the mean of the GPUs, in ns."""
        chosen = [CAUSES.index(cause) for cause in causes]
        return int(self.measured()[:, chosen].sum()) // max(len(self.devices), 1)


def gpu_causes(context: Context) -> UInts8:
    """Returns for each GPU activity the number of its cause in GPU_CAUSES."""
    activity, strings = context.get(gpu), context.trace.strings
    matrix = (matches(strings, _MATRIX) & ~matches(strings, _NO_MATRIX)) | context.get(uses_tensor_cores)
    pointwise = matches(strings, ELEMENTWISE)
    pageable, pinned, on_device = (matches(strings, pattern) for pattern in (PAGEABLE, _PINNED, _ON_DEVICE))
    of_kernel = np.select([pointwise, matrix], [1, 0], 2)
    of_copy = np.select([pageable, pinned, on_device], [4, 5, 6], 7)
    name, kind = activity.name, activity.kind
    found = np.select([activity.communication, kind == KERNEL, kind == MEMCPY], [3, of_kernel[name], of_copy[name]], 8)
    return found.astype(np.uint8)


def _tiles(context: Context, device: int) -> _Tiles:
    activity, cause = context.get(gpu), context.get(gpu_causes)
    low, high = context.get(idle_window)
    own = (activity.device == device) & (activity.start < high) & (activity.end > low)
    start, end = np.maximum(activity.start[own], low), np.minimum(activity.end[own], high)
    ran = [union(start[cause[own] == n], end[cause[own] == n]) for n in range(UNRECORDED)]
    lost = unrecorded(context.trace, GPU_TABLES)
    found = active_sets([*ran, intersection(lost, Union(np.array([low]), np.array([high])))])
    length = np.diff(found.time, append=found.time[-1:])
    busy = (found.mask != 0) & (length > 0)
    pieces, gaps = context.get(idle_pieces), context.get(idle_gaps)
    idle = np.flatnonzero(gaps.device[pieces.gap] == device)
    starts = np.concatenate([found.time[busy], pieces.start[idle]])
    order = np.argsort(starts, kind="stable")
    return _Tiles(
        starts[order],
        np.concatenate([(found.time + length)[busy], pieces.end[idle]])[order],
        np.concatenate([_FIRST[found.mask[busy]], pieces.cause[idle] + len(GPU_CAUSES)])[order],
        np.concatenate([np.full(np.count_nonzero(busy), NOTHING), idle])[order],
    )


def time_causes(context: Context) -> TimeCauses:
    """Returns the time of every cause in every step of every GPU."""
    ranges = context.get(measured_steps)
    devices = tuple(context.get(idle_gaps).windows)
    time = np.zeros((len(devices), len(CAUSES), len(ranges.start)), np.int64)
    details: list[Detail] = []
    for place, device in enumerate(devices):
        tiles = _tiles(context, device)
        parts = cut(ranges.start, ranges.end, tiles.start)
        tile = np.searchsorted(tiles.start, parts.start, side="right") - 1
        cause, length = tiles.cause[tile], parts.end - parts.start
        np.add.at(time[place], (cause, parts.owner), length)
        measured = ~ranges.left_out[parts.owner]
        details += _details(context, device, cause[measured], tiles.piece[tile][measured], length[measured])
    details.sort(key=lambda detail: -detail.time_ns)
    return TimeCauses(ranges, devices, time, tuple(details))


def _details(context: Context, device: int, cause: Ints, piece: Ints, length: Ints) -> list[Detail]:
    idle = piece >= 0
    cause, piece, length = cause[idle], piece[idle], length[idle]
    if not len(piece):
        return []
    pieces, lines = context.get(idle_pieces), context.trace.table("python_function")["line"]
    name, frame, reason = pieces.name[piece], pieces.frame[piece], pieces.reason[piece].astype(np.int64)
    line = np.append(lines, 0)[frame].astype(np.int64)
    found = group([cause, name, line, reason])
    time, count = found.sums(length), np.bincount(found.number, minlength=len(found))
    first = found.first
    columns = (cause[first], name[first], line[first], frame[first], reason[first], time, count)
    return [Detail(device, *values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def measured_steps(context: Context) -> MeasuredSteps:
    """Returns the complete steps of a trace, or its window if it has none."""
    found = context.get(whole_steps)
    if len(found):
        pace = context.get(step_pace)
        return MeasuredSteps(found.number, found.start, found.end, pace.left_out, pace)
    low, high = context.get(idle_window)
    first = _after_warm_up(context, low, high)
    borders = np.array([low, first, high] if low < first < high else [low, high], np.int64)
    return MeasuredSteps(np.full(len(borders) - 1, -1), borders[:-1], borders[1:], borders[1:] <= first)


def _after_warm_up(context: Context, low: int, high: int) -> int:
    """Returns when the last one-time gap ends, or `low` if there is none. Unix ns."""
    gaps = context.get(idle_gaps)
    end = _once(context, gaps, low, high) if len(gaps.windows) == 1 else None
    while end is not None:
        low, end = end, _once(context, gaps, end, high)
    return low


def _once(context: Context, gaps: IdleGaps, low: int, high: int) -> int | None:
    """Returns the end of the last one-time gap since `low`; None if there is none."""
    activity = context.get(gpu)
    inside = np.sort(activity.start[(activity.start > low) & (activity.start < high)])
    if len(inside) < MIN_ACTIVITIES:
        return None
    followed = (gaps.start >= low) & (gaps.after >= 0)
    early = gaps.end <= inside[len(inside) // 2]
    later = int(gaps.length[followed & ~early].sum())
    least = max(ONCE_NS, ONCE_SHARE * (high - low), later)
    once = followed & early & (gaps.length > least)
    return int(gaps.end[once].max()) if once.any() else None
