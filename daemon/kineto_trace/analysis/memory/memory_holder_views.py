"""What held the memory of a device: over time by operator, and at the peak block by block with its stack."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.memory.memory_views import held_at, missing_blocks, operator_names
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.allocations import NOTHING, Records, levels, memory_records
from kineto_trace.structure.call_stacks import call_stacks
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
OTHERS = "other operators"


@view(
    "memory_holders",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time"),
        ("time_us", "float", "us", "time since the window of the recording began"),
        (
            "operator",
            "text",
            "",
            'operator that allocated the blocks; "other operators": all without rows of their own; missing: none',
        ),
        ("held_bytes", "int", "bytes", "bytes of its blocks that were held at that time"),
    ),
)
def memory_holders(context: Context, *, points: int = 120, operators: int = 8) -> Answer:
    """Which operators' blocks filled the memory of each device over time, at equally spaced moments.

    The operators that held most at any of these moments have rows of their own, the others share one. Only blocks that
    were allocated in the recording count: what was held before it has no operator, and is not in these rows.

    Options:
    - points: number of moments per device.
    - operators: number of operators with rows of their own.
    """
    if points < 2 or operators < 1:
        raise ViewError(f"view memory_holders: points={points}, operators={operators}; use 2 and 1 or more")
    records = context.get(memory_records)
    owners = operator_names(context, records)
    values: dict[str, list[Any]] = {column.name: [] for column in memory_holders.columns}
    for device, label in enumerate(records.devices):
        time = levels(records, device)[0]
        moments = time[0] + (time[-1] - time[0]) * np.arange(points, dtype=np.int64) // (points - 1)
        rows = np.flatnonzero((records.device == device) & (records.bytes > 0) & records.addressed)
        numbers = unique_values(owners.number[rows])
        of_each = [_held(records, rows[owners.number[rows] == number], moments) for number in numbers.tolist()]
        held = np.array(of_each, np.int64).reshape(len(numbers), points)
        order = np.argsort(-held.max(axis=1), kind="stable")
        own, rest = order[:operators], order[operators:]
        texts = [str(text) if text is not None else None for text in owners.texts[numbers[own]].tolist()]
        series = [*zip(texts, held[own], strict=True), *([(OTHERS, held[rest].sum(0))] if len(rest) else [])]
        for text, amounts in series:
            values["device"] += [label] * points
            values["time_ns"] += moments.tolist()
            values["time_us"] += ((moments - context.trace.window_start_ns) / 1000).tolist()
            values["operator"] += [text] * points
            values["held_bytes"] += amounts.tolist()
    return Answer(values, missing_blocks(records))


def _held(records: Records, rows: Ints, moments: Ints) -> Ints:
    """The bytes of these allocations that are held at each of the moments (ascending)."""
    released = rows[records.other[rows] != NOTHING]
    release = records.other[released]
    order = np.argsort(records.time[release], kind="stable")
    gone = _until(records.time[release][order], records.bytes[released][order], moments)
    return _until(records.time[rows], records.bytes[rows], moments) - gone


def _until(times: Ints, amounts: Ints, moments: Ints) -> Ints:
    """The sums of the amounts up to each moment, included. times: ascending."""
    return np.append(0, np.cumsum(amounts))[np.searchsorted(times, moments, "right")]


@view(
    "memory_peak_blocks",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time at which the peak of the device was first reached"),
        ("operator", "text", "", "operator that allocated the blocks; missing: outside operators"),
        ("held_bytes", "int", "bytes", "bytes of these blocks"),
        ("blocks", "int", "", "number of blocks that the operator allocated with this stack"),
        ("call_stack", "text", "", "Python frames, innermost first; missing: the trace has none there"),
    ),
)
def memory_peak_blocks(context: Context, *, top: int = 50) -> Answer:
    """The blocks that were held when most memory of a device was allocated, by operator and Python stack.

    Blocks are those of the view memory_peak; what was allocated before the recording has none. Stacks are those of the
    operators, as in the view operators. Rows are grouped by device, most bytes first.

    Options:
    - top: number of rows per device.
    """
    records, stacks = context.get(memory_records), context.get(call_stacks)
    owners = operator_names(context, records)
    stack = np.append(stacks.of_op, NOTHING)[records.op].astype(np.int64)
    values: dict[str, list[Any]] = {column.name: [] for column in memory_peak_blocks.columns}
    for device, label in enumerate(records.devices):
        time, allocated, _, _ = levels(records, device)
        when = int(time[int(np.argmax(allocated))])
        rows = held_at(records, device, when)
        keys, place = np.unique(np.stack([owners.number[rows], stack[rows]], axis=1), axis=0, return_inverse=True)
        held = np.zeros(len(keys), np.int64)
        np.add.at(held, place.reshape(-1), records.bytes[rows])
        counts = np.bincount(place.reshape(-1), minlength=len(keys))
        for at in np.argsort(-held, kind="stable")[:top].tolist():
            values["device"].append(label)
            values["time_ns"].append(when)
            values["operator"].append(owners.texts[keys[at, 0]])
            values["held_bytes"].append(int(held[at]))
            values["blocks"].append(int(counts[at]))
            values["call_stack"].append(stacks.text(context.trace, int(keys[at, 1])))
    return Answer(values, missing_blocks(records))
