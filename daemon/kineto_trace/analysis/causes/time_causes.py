"""What every nanosecond of the steps went to: for each GPU one cause at each moment, so that they sum to the whole.

Theory of operation
    While the GPU has work, the most useful kind of it counts (GPU_CAUSES, in this order): communication and copies thus
    count only where no computation hides them. On one rank a collective's waiting for other ranks cannot be told from
    its transfer. Where the GPU's activities were not recorded, nothing is known. While the GPU is idle, what the host
    did counts (idle_pieces.py).

    Both together tile the window of each GPU without holes or overlaps. The steps are cut out of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.measured_steps import MeasuredSteps, measured_steps
from kineto_trace.analysis.idle.idle_gaps import idle_gaps, idle_window
from kineto_trace.analysis.idle.idle_pieces import IDLE_CAUSES, PAGEABLE, idle_pieces
from kineto_trace.arrays.active_sets import active_sets, cut
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.tensor_cores import uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import KERNEL, MEMCPY, NOTHING, gpu
from kineto_trace.structure.recorded_time import unrecorded

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
    r"|cudnn.*(?:ampere|volta|hopper)|attention|[fF]mha|flash_|(?:attn|sage)_[fb]wd|cutlass|nvjet|Cijk_|dot_kernel|splitK"
    r"|matmul|^bmm_|gen\d*_conv|_convolution|sdpa|xetla"
)  # not FBGEMM's kernels for embeddings, which have its name
_NO_MATRIX = re.compile(
    r"[eE]lementwise|conv_reorder|batch_?norm|layer_?norm|compute\w*Offsets|nchwToNhwc|nhwcToNchw|softmax|pool|[Ii]m2(?:d2)?[Cc]ol"
    r"|reshape_and_cache|finalize_matmul|triton_(?:poi|per|red)_"
)
ELEMENTWISE = re.compile(
    r"elementwise_kernel|CatArrayBatchedCopy|index_elementwise|multi_tensor_apply|triton_poi_"
    r"|xpu::\w*(?:Elementwise\w*Kernel|MultiTensorApply)"
)
_PINNED = re.compile(r"Pinned", re.IGNORECASE)
_ON_DEVICE = re.compile(r"DtoD|PtoP|Device -> Device|DeviceToDevice|PeerToPeer", re.IGNORECASE)

Ints = npt.NDArray[np.int64]


class Detail(NamedTuple):
    """A part of a cause. name: number into Trace.strings, or NOTHING; line: executing one of a Python function, or 0.

    frame: row of python_function, or NOTHING. reason: number into REASONS of idle_pieces.
    """

    device: int
    cause: int
    name: int
    line: int
    frame: int
    reason: int
    time_ns: int
    pieces: int


@dataclass(frozen=True, slots=True)
class TimeCauses:
    """time_ns: [device, cause, step], by the places in `devices`, CAUSES and the ranges of `steps`.

    details: of the time of measured steps, those with the most time first; names of kernels are not among them.
    """

    steps: MeasuredSteps
    devices: tuple[int, ...]
    time_ns: npt.NDArray[np.int64]
    details: tuple[Detail, ...]

    def measured(self) -> Ints:
        """Returns the time of the measured steps: [device, cause], in ns."""
        found: Ints = self.time_ns[:, :, ~self.steps.left_out].sum(axis=2)
        return found

    def total(self, *causes: str) -> int:
        """Returns the time of these causes in the measured steps, as the mean of the GPUs, in ns."""
        chosen = [CAUSES.index(cause) for cause in causes]
        return int(self.measured()[:, chosen].sum()) // max(len(self.devices), 1)


class _Tiles(NamedTuple):
    """What a GPU's time went to, without holes: from each start to the next one. piece: place in IdlePieces."""

    start: Ints
    end: Ints
    cause: Ints
    piece: Ints


def gpu_causes(context: Context) -> npt.NDArray[np.uint8]:
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


_FIRST = np.array([(mask & -mask).bit_length() - 1 for mask in range(1 << len(GPU_CAUSES))])  # lowest bit of a mask


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
