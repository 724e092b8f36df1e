"""The allocator's records in order, the pairs of allocation and free, and the memory held over time.

Theory of operation
    A record is an allocation (bytes > 0) or a release. Addresses are reused: a release belongs to the last record of
    its address and device before it, if that is an allocation. So pairs are neighbours once records are sorted by
    device, address and time. Allocations without a release were still held at the end (or their release was lost);
    releases without an allocation are of memory from before the recording.

    A record belongs to the innermost operator that runs on its thread at its time; if the thread is unknown, to the
    operator with its external id.
"""

from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.id_sets import lookup
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, UInts64
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.event_arguments import has_column

MEMORY = "[memory]"
CPU, CUDA = 0, 1  # c10::DeviceType
# Names of the device types in allocators' records.
DEVICE_NAMES = {CPU: "CPU", CUDA: "GPU", 6: "HIP", 9: "XLA", 12: "XPU", 13: "MPS", 15: "HPU", 18: "IPU", 19: "MTIA"}


@dataclass(frozen=True, slots=True)
class Records:
    """Allocations and releases in the order of time (Unix ns).

    row: of cpu_instant_event.
    device: place in `devices`.
    bytes: negative for releases.
    allocated, reserved: bytes on the device afterwards; -1 if unknown.
    addressed: whether the address is known (PyTorch before 1.10 did not record it).
    other: place of the release of an allocation and vice versa, or NOTHING.
    op: row of cpu_op, or NOTHING.
    """

    row: Ints
    time: Ints
    device: Ints
    bytes: Ints
    address: UInts64
    addressed: Flags
    allocated: Ints
    reserved: Ints
    other: Ints
    op: Ints
    devices: tuple[str, ...]
    device_types: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.row)


def memory_records(context: Context) -> Records:
    """Returns the allocator's records ("[memory]" events) without failed allocations."""
    table = context.trace.table("cpu_instant_event")
    named = np.array([text == MEMORY for text in context.trace.strings], np.bool_)
    row = np.flatnonzero(named[table["name"]]) if len(table) else np.empty(0, np.int64)
    row = row[np.argsort(table["start"][row], kind="stable")]
    types, numbers = table["device_type"][row].astype(np.int64), table["device"][row].astype(np.int64)
    keys, device = np.unique((types << 32) + np.where(types == CPU, -1, numbers) + 1, return_inverse=True)
    kinds = np.stack([keys >> 32, (keys & 0xFFFFFFFF) - 1])
    size = table["bytes"][row]
    addressed = has_column(table, "Addr")[row]
    other = np.full(len(row), NOTHING, np.int64)
    some = np.flatnonzero(addressed)
    found = pairs(device[some], table["address"][row[some]], size[some])
    other[some] = np.where(found >= 0, np.append(some, NOTHING)[found], NOTHING)
    return Records(
        row=row,
        time=table["start"][row],
        device=device,
        bytes=size,
        address=table["address"][row],
        addressed=addressed,
        allocated=table["total_allocated"][row],
        reserved=table["total_reserved"][row],
        other=other,
        op=_ops_of(context, table, row),
        devices=tuple(_device_name(kind, number) for kind, number in kinds.T.tolist()),
        device_types=tuple(kinds[0].tolist()),
    )


def _device_name(kind: int, number: int) -> str:
    name = DEVICE_NAMES.get(kind, f"device type {kind}, ")
    return name if kind == CPU else f"{name}{number}"


def pairs(device: Ints, address: UInts64, size: Ints) -> Ints:
    """For each record (by time): the place of the record that it makes a pair with; NOTHING: none.

    size: bytes; above 0 for allocations.
    """
    order = np.lexsort((address, device))
    same = (address[order][1:] == address[order][:-1]) & (device[order][1:] == device[order][:-1])
    found = same & (size[order][:-1] > 0) & (size[order][1:] <= 0)
    first, second = order[:-1][found], order[1:][found]
    other = np.full(len(order), NOTHING, np.int64)
    other[first], other[second] = second, first
    return other


def _ops_of(context: Context, table: Table, row: Ints) -> Ints:
    tree, operators = context.get(ops), context.trace.table("cpu_op")
    if not len(operators) or not len(row):
        return np.full(len(row), NOTHING, np.int64)
    place = tree.nested.innermost(table["thread"][row], table["start"][row]).astype(np.int64)
    found = np.where(place >= 0, tree.row[place], NOTHING)
    external = table["external_id"][row]
    by_id = lookup(external.astype(np.uint64), operators["id"].astype(np.uint64), np.arange(len(operators)), NOTHING)
    unknown = (table["thread"][row] == 0) & (external != 0)
    return np.where(unknown, by_id, found)


def levels(records: Records, device: int) -> tuple[Ints, Ints, Ints, bool]:
    """Returns times (Unix ns), allocated and reserved bytes after each record of a device, and whether they are
    relative.

    If the trace does not state totals, the bytes allocated since the recording began replace them (they may be
    negative), and reserved is -1 throughout.
    """
    mine = np.flatnonzero(records.device == device)
    told = mine[(records.allocated[mine] >= 0)]
    if len(told):
        return records.time[told], records.allocated[told], records.reserved[told], False
    return records.time[mine], np.cumsum(records.bytes[mine]), np.full(len(mine), -1), True


def largest_triangles(points: Floats, count: int) -> Ints:
    """Returns the `count` rows of a curve (x, y, …, by x) that show its shape best, including the first and the last.

    Largest Triangle Three Buckets: from every bucket the point that makes the largest triangle with the previously
        chosen point and the mean of the next bucket. All rows if there are no more than `count`; a curve has at least 3
        rows.
    """
    length = len(points)
    if count >= length:
        return np.arange(length)
    buckets = np.array_split(np.arange(1, length - 1), count - 2)
    bounds = [(int(bucket[0]), int(bucket[-1]) + 1) for bucket in buckets] + [(length - 1, length)]
    chosen = np.zeros(count, np.int64)
    chosen[-1] = length - 1
    x, y = points[:, 0], points[:, 1]
    for number in range(len(buckets)):
        (first, stop), (after, end) = bounds[number], bounds[number + 1]
        last = chosen[number]
        mean_x, mean_y = points[after:end].mean(axis=0)[:2].tolist()
        area = np.abs((x[last] - mean_x) * (y[first:stop] - y[last]) - (x[last] - x[first:stop]) * (mean_y - y[last]))
        chosen[number + 1] = first + int(np.argmax(area))
    return chosen
