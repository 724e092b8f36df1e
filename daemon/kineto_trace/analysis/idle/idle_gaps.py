"""Why a GPU did nothing: one cause for every gap between its activities.

Theory of operation
    A gap is a stretch in which no kernel, copy or fill runs on a GPU, between its first and its last activity in the
    window: the training steps, or the whole trace if it has none. The activity that ends the gap tells why it was
    not there earlier, through the call that launched it:

    queued            it had been launched before the gap began: it waited for an event, another stream or the launch
    synchronisation   launched in the gap, by a host that was blocked when the gap began: the host had waited for the
                      GPU to finish everything, and then the GPU waited for the host to come with more
    data_loading      … and for at least half of the time until the launch, the host waited for the next batch
    communication     … likewise, for a collective on the host (gloo, barriers, waiting for other ranks)
    memory            … likewise, for the allocation or release of device or pinned memory by CUDA
    host              … the host was busy with anything else: Python, operators, launches
    unknown           the launch is not in the trace

    "Blocked" means a synchronising call (or a copy that waits) of any thread that launches work. The operator of a
    gap is the one around the blocking call for synchronisation, for queued work the one that launched it, else
    the innermost one that ran half way between the beginning of the gap and the launch, on the launching thread.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.intervals import Union, union
from kineto_trace.kernel_traits.kernel_types import communication_op_names, data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES
from kineto_trace.structure.activity_links import NOTHING, Calls, calls, gpu, ops, steps

CAUSES = ("host", "synchronisation", "data_loading", "communication", "memory", "queued", "unknown")
HOST, SYNCHRONISATION, DATA_LOADING, COMMUNICATION, MEMORY, QUEUED, UNKNOWN = range(len(CAUSES))
BLOCKING = re.compile(r"^(?:cuda|hip)(?:Device|Stream|Event|Ctx)Synchronize|^cu(?:Ctx|Stream|Event)Synchronize")
BLOCKING_COPY = re.compile(r"^(?:cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)")
ALLOCATING = re.compile(
    r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostRegister|HostUnregister|HostFree)(?!Async)"
    r"|^cuMem(?:Alloc|Free|Map|Unmap|Create|Release|SetAccess|HostRegister|AddressReserve)(?!Async)"
)

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IdleGaps:
    """Gaps in the order of (device, start), times in Unix ns.

    cause: number into CAUSES. before, after: places in parts.Gpu. launch: place in parts.Calls of what launched
    `after`; blocking: likewise the call that had waited; op: row of cpu_op; NOTHING: none. step: place in parts.Steps.
    windows: device -> the length (ns) in which its gaps were looked for.
    """

    device: Ints
    start: Ints
    end: Ints
    cause: npt.NDArray[np.uint8]
    before: Ints
    after: Ints
    launch: Ints
    blocking: Ints
    op: Ints
    step: Ints
    windows: dict[int, int]

    def __len__(self) -> int:
        return len(self.device)

    @property
    def length(self) -> Ints:
        """Returns the length of each gap, in ns."""
        return self.end - self.start


def idle_gaps(context: Context) -> IdleGaps:
    """All gaps of all GPUs."""
    activity, called = context.get(gpu), context.get(calls)
    low, high = _window(context)
    nothing = np.empty(0, np.int64)
    found: list[tuple[Ints, ...]] = [(nothing,) * 5]
    windows = {}
    for device in np.unique(activity.device).tolist():
        rows = np.flatnonzero((activity.device == device) & (activity.start < high) & (activity.end > low))
        if not len(rows):
            continue
        reach = np.maximum.accumulate(activity.end[rows])
        windows[device] = int(min(high, reach[-1]) - max(low, activity.start[rows[0]]))
        at = np.flatnonzero(activity.start[rows[1:]] > reach[:-1]) + 1
        last = rows[np.searchsorted(reach, reach[at - 1])]  # the one that ended last before the gap
        found.append((np.full(len(at), device), reach[at - 1], activity.start[rows[at]], last, rows[at]))
    device, start, end, before, after = (np.concatenate(part) for part in zip(*found, strict=True))
    launch = activity.call[after]
    blocking = _blocking(context, called, launch, start)
    cause, op = _causes(context, called, launch, blocking, start)
    return IdleGaps(device, start, end, cause, before, after, launch, blocking, op, _step(context, start), windows)


def _window(context: Context) -> tuple[int, int]:
    found = context.get(steps)
    if len(found):
        return int(found.start.min()), int(found.end.max())
    return context.trace.window_start_ns, context.trace.window_end_ns


def _step(context: Context, moment: Ints) -> Ints:
    found = context.get(steps)
    if not len(found):
        return np.full(len(moment), NOTHING)
    at = np.searchsorted(found.start, moment, side="right") - 1
    return np.where((at >= 0) & (moment < found.end[at]), at, NOTHING)


def blocking_calls(context: Context) -> Flags:
    """Returns for each of parts.Calls whether it waits for the GPU on a thread that launches work."""
    called, activity, strings = context.get(calls), context.get(gpu), context.trace.strings
    launching = np.unique(called.thread[activity.call[activity.call >= 0]])
    waits = matches(strings, BLOCKING)[called.name] | matches(strings, BLOCKING_COPY)[called.name]
    found: Flags = waits & np.isin(called.thread, launching)
    return found


def _blocking(context: Context, called: Calls, launch: Ints, start: Ints) -> Ints:
    """For each gap the blocking call that was running when it began and ended before the launch; NOTHING: none."""
    rows = np.flatnonzero(context.get(blocking_calls))
    if not len(rows) or not len(start):
        return np.full(len(start), NOTHING)
    rows = rows[np.argsort(called.start[rows], kind="stable")]
    at = np.searchsorted(called.start[rows], start, side="right") - 1
    # Of calls that overlap (on several threads) the one that ends last among the nearest is what held the host.
    best = np.full(len(start), NOTHING)
    for back in range(min(4, len(rows))):
        candidate = rows[np.maximum(at - back, 0)]
        running = (at >= back) & (called.end[candidate] > start) & (launch >= 0)
        running &= called.end[candidate] <= called.start[launch]
        later = (best == NOTHING) | (called.end[candidate] > called.end[best])
        best = np.where(running & later, candidate, best)
    return best


def _causes(
    context: Context, called: Calls, launch: Ints, blocking: Ints, start: Ints
) -> tuple[npt.NDArray[np.uint8], Ints]:
    cause = np.full(len(start), HOST, np.uint8)
    if not len(start):
        return cause, np.empty(0, np.int64)
    known = launch >= 0
    launched = called.start[launch] if len(called) else np.zeros(len(start), np.int64)
    waited = np.maximum(launched - start, 0)
    for number, covering in (
        (MEMORY, _call_union(context, called)),
        (COMMUNICATION, _host_union(context, context.get(communication_op_names))),
        (DATA_LOADING, _host_union(context, context.get(data_loading_names))),
    ):
        cause[2 * covering.within(start, start + waited) >= np.maximum(waited, 1)] = number
    cause[blocking >= 0] = SYNCHRONISATION
    cause[launched <= start] = QUEUED
    cause[~known] = UNKNOWN
    thread = called.thread[launch] if len(called) else np.zeros(len(start), np.uint32)
    tree = context.get(ops)
    op = np.full(len(start), NOTHING)
    if len(tree.row):
        inside = tree.nested.innermost(thread, start + waited // 2)
        op = np.where(inside >= 0, tree.row[inside], NOTHING)
    if len(called):
        op = np.where(cause == QUEUED, called.op[launch], op)
        op = np.where(blocking >= 0, called.op[blocking], op)
    return cause, np.where(known, op, NOTHING)


def _call_union(context: Context, called: Calls) -> Union:
    chosen = matches(context.trace.strings, ALLOCATING)[called.name]
    return union(called.start[chosen], called.end[chosen])


def _host_union(context: Context, names: Flags) -> Union:
    tables = [context.trace.table(kind) for kind in OP_TABLES]
    chosen = [names[table["name"]] for table in tables]
    return union(
        np.concatenate([table["start"][mask] for table, mask in zip(tables, chosen, strict=True)]),
        np.concatenate([table.end()[mask] for table, mask in zip(tables, chosen, strict=True)]),
    )
