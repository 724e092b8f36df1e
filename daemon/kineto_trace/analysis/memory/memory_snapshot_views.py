"""Memory at one moment, block by block, and how much of what the allocator holds is not given out."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.memory.memory_views import held_at, missing, missing_blocks, operator_names
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.allocations import NOTHING, Records, levels, memory_records
from kineto_trace.structure.call_stacks import call_stacks
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_RESERVED = "the trace does not say what the allocator holds, so what it holds unused is unknown"

Ints = npt.NDArray[np.int64]


@view(
    "memory_snapshot",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time of the moment"),
        ("allocated_bytes", "int", "bytes", "held by the program then, as memory_curve has it"),
        (
            "operator",
            "text",
            "",
            "operator that allocated the block; missing: outside operators, or before the recording",
        ),
        ("size_bytes", "int", "bytes", "size of the block, or of all blocks that the row stands for"),
        ("blocks", "int", "", "1, or how many smaller blocks share the row; missing: allocated before the recording"),
        ("address", "int", "", "of the block; missing: of several blocks, or allocated before the recording"),
        ("allocation_us", "float", "us", "time of its allocation since the window of the recording began"),
        ("age_us", "float", "us", "for how long it had been held"),
        ("call_stack", "text", "", "Python frames, innermost first; missing: the trace has none there"),
    ),
)
def memory_snapshot(context: Context, *, at_ns: int | None = None, top: int = 500) -> Answer:
    """What each device held at one moment: one row per block, the largest first.

    A block counts if it was allocated at or before that time and released after it. The last rows of a device are one
    for all smaller blocks and one for memory that was allocated before the recording. Stacks are those of the
    operators, as in the view operators.

    Options:
    - at_ns: the moment (Unix ns). Without it, the moment of each device's peak.
    - top: number of blocks per device with rows of their own.
    """
    if top < 1:
        raise ViewError(f"view memory_snapshot: top={top} shows no block; use 1 or more")
    records, stacks = context.get(memory_records), context.get(call_stacks)
    owners = operator_names(context, records)
    stack = np.append(stacks.of_op, NOTHING)[records.op]
    values: dict[str, list[Any]] = {column.name: [] for column in memory_snapshot.columns}
    for device, label in enumerate(records.devices):
        when, allocated = _moment(records, device, at_ns)
        rows = held_at(records, device, when)
        rows = rows[np.argsort(-records.bytes[rows], kind="stable")]
        own, rest = rows[:top], rows[top:]
        since = (records.time[own] - context.trace.window_start_ns) / 1000
        found: list[tuple[Any, ...]] = [
            (name, size, 1, address, at, age, stacks.text(context.trace, number))
            for name, size, address, at, age, number in zip(
                owners.of(own).tolist(),
                records.bytes[own].tolist(),
                records.address[own].astype(np.int64).tolist(),
                since.tolist(),
                ((when - records.time[own]) / 1000).tolist(),
                stack[own].tolist(),
                strict=True,
            )
        ]
        smaller, before = int(records.bytes[rest].sum()), allocated - int(records.bytes[rows].sum())
        found += [(None, smaller, len(rest), None, None, None, None)] if len(rest) else []
        found += [(None, before, None, None, None, None, None)] if before > 0 else []
        for entry in found:
            for name, value in zip(values, (label, when, allocated, *entry), strict=True):
                values[name].append(value)
    return Answer(values, missing_blocks(records))


def _moment(records: Records, device: int, at_ns: int | None) -> tuple[int, int]:
    """The moment that is looked at (Unix ns), by default that of the peak, and the bytes that are allocated then."""
    time, allocated, _, _ = levels(records, device)
    if at_ns is None:
        top = int(np.argmax(allocated))
        return int(time[top]), int(allocated[top])
    place = int(np.searchsorted(time, at_ns, "right")) - 1
    if place >= 0:
        return at_ns, int(allocated[place])
    # Before its first record, a device holds what it has after that without what that changed.
    first = int(np.flatnonzero(records.device == device)[0])
    return at_ns, max(int(allocated[0]) - int(records.bytes[first]), 0)


@view(
    "memory_fragmentation",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("peak_bytes", "int", "bytes", "most bytes that were allocated at the same time"),
        ("peak_ns", "int", "ns", "Unix time at which they first were"),
        ("reserved_bytes", "int", "bytes", "held by the allocator at that time"),
        ("unused_bytes", "int", "bytes", "reserved minus allocated at that time"),
        ("unused_pct", "float", "%", "share of reserved_bytes"),
        ("mean_unused_pct", "float", "%", "mean over time of the unused share"),
        ("most_unused_bytes", "int", "bytes", "the largest difference between reserved and allocated bytes"),
        ("most_unused_ns", "int", "ns", "Unix time at which it was first that large"),
    ),
)
def memory_fragmentation(context: Context) -> Answer:
    """How much of the memory that the allocator reserved it had not given out: one row per device.

    Such memory is cached for later, or lies between blocks where none fits. Where the trace has no reserved bytes, as
    for the CPU, a row has the peak alone.
    """
    records = context.get(memory_records)
    values: dict[str, list[Any]] = {column.name: [] for column in memory_fragmentation.columns}
    notes = missing(records)
    for device, label in enumerate(records.devices):
        time, allocated, reserved, _ = levels(records, device)
        top = int(np.argmax(allocated))
        found: tuple[Any, ...] = (None,) * 6
        if (reserved >= 0).all() and reserved.any():
            found = _unused(time, allocated, reserved, top)
        else:
            notes.append(f"{label}: {NO_RESERVED}")
        for name, value in zip(values, (label, int(allocated[top]), int(time[top]), *found), strict=True):
            values[name].append(value)
    return Answer(values, notes)


def _unused(time: Ints, allocated: Ints, reserved: Ints, top: int) -> tuple[Any, ...]:
    """The last columns of memory_fragmentation. top: place of the peak."""
    unused = np.maximum(reserved - allocated, 0)
    share = np.divide(100 * unused, reserved, out=np.zeros(len(time)), where=reserved > 0)
    most, lasting = int(np.argmax(unused)), np.diff(time)
    return (
        int(reserved[top]),
        int(unused[top]),
        float(share[top]),
        float((share[:-1] * lasting).sum() / lasting.sum()) if lasting.any() else float(share[top]),
        int(unused[most]),
        int(time[most]),
    )
