"""Which inputs of ops are the same tensor, and which memory an op allocated.

Theory of operation
    An input is known by two addresses, that of its TensorImpl and that of its storage's data; both are used again
    for other tensors. Tensors that share storage (views) count as one, as in PyTorch's own unique ids.

    With allocation events, a storage address is one tensor from its allocation (or from the beginning) until its
    free; an allocation of a block whose free was not seen also begins a new one. This is PyTorch's rule.

    PyTorch also joins the storages that one TensorImpl had. It keeps every TensorImpl from being destroyed while
    it records, so that an address stands for one of them. An observer that only reads addresses must not do this:
    temporary views come and go at the same addresses all the time. `impls_are_kept` says which it was. PyTorch takes
    all tensors that had no storage at some time for one tensor, with what they got later; `impls_are_kept` does so
    too, otherwise a tensor without storage is known by its TensorImpl alone.

    Without allocation events nothing says when storage was freed. Then two TensorImpls on one storage address are
    the same tensor if the times from their first to their last use overlap; otherwise the address was used again.
    A view that is first used after the last use of what it was made from counts as another tensor, and a tensor
    that has both addresses of an earlier one counts as that one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import lookup
from kineto_trace.model.trace import OP_TABLES, Table

NO_TENSOR = -1
NO_STORAGE = 0

Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TensorIds:
    """Numbers of tensors, from 0 on in the order of their first appearance; NO_TENSOR: not known to be one.

    inputs: per row of op_tensor. allocations: per row of cpu_instant_event.
    """

    inputs: Ints
    allocations: Ints
    count: int


@dataclass(frozen=True, slots=True)
class _Uses:
    """All that happened to storage addresses: uses as inputs first, then allocations and frees. Times in Unix ns."""

    storage: Addresses
    impl: Addresses  # 0: an allocation or a free
    time: Ints
    end: Ints  # of the op
    allocates: npt.NDArray[np.bool_]
    frees: npt.NDArray[np.bool_]


def tensor_ids(tables: Mapping[str, Table], *, impls_are_kept: bool = False) -> TensorIds:
    """The tensors of a trace. Inputs of ops that are not in the trace are none."""
    inputs, events = tables.get("op_tensor"), tables.get("cpu_instant_event")
    input_count, event_count = (0 if table is None else len(table) for table in (inputs, events))
    result = TensorIds(np.full(input_count, NO_TENSOR), np.full(event_count, NO_TENSOR), 0)
    if inputs is None or not input_count:
        return result
    row, start, end = _op_times(inputs, tables)
    uses = _uses(inputs.take(row), start, end, events, known_without_storage=not impls_are_kept)
    storage = _by_lifetime(uses) if event_count else _by_overlap(uses)
    is_tensor = np.zeros(int(storage.max(initial=-1)) + 1, np.bool_)
    is_tensor[storage[: len(row)]] = True
    if impls_are_kept:
        storage = _joined(storage, uses.impl, len(is_tensor))
    numbers = np.full(len(is_tensor), NO_TENSOR, np.int64)
    order = np.argsort(uses.time, kind="stable")
    seen = storage[order][is_tensor[storage[order]]]
    interner = Interner()
    interner.intern(seen.astype(np.uint64))
    numbers[interner.keys().astype(np.int64)] = np.arange(len(interner))
    result.inputs[row] = numbers[storage[: len(row)]]
    result.allocations[:] = numbers[storage[len(row) :]]
    return TensorIds(result.inputs, result.allocations, len(interner))


def _op_times(inputs: Table, tables: Mapping[str, Table]) -> tuple[Ints, Ints, Ints]:
    """The inputs whose ops are in the trace, and the starts and ends of these ops."""
    ops = [tables[kind] for kind in OP_TABLES if kind in tables]
    nothing = np.empty(0, np.int64)
    ids, start, end = (
        np.concatenate([nothing, *columns])
        for columns in ([t["id"] for t in ops], [t["start"] for t in ops], [t.end() for t in ops])
    )
    places = lookup(inputs["op"].astype(np.uint64), ids.astype(np.uint64), np.arange(len(ids)), -1)
    row = np.flatnonzero(places >= 0)
    return row, start[places[row]], end[places[row]]


def _uses(inputs: Table, start: Ints, end: Ints, events: Table | None, *, known_without_storage: bool) -> _Uses:
    """The uses and what the allocator did."""
    storage = inputs["storage"]
    if known_without_storage:
        storage = np.where(storage == NO_STORAGE, inputs["impl"], storage)
    nothing = np.zeros(len(inputs), np.bool_)
    if events is None:
        return _Uses(storage, inputs["impl"], start, end, nothing, nothing)
    return _Uses(
        np.concatenate([storage, events["address"]]),
        np.concatenate([inputs["impl"], np.zeros(len(events), np.uint64)]),
        np.concatenate([start, events["start"]]),
        np.concatenate([end, events["start"]]),
        np.concatenate([nothing, events["bytes"] > 0]),
        np.concatenate([nothing, events["bytes"] < 0]),
    )


def _by_lifetime(uses: _Uses) -> Ints:
    """A number for each storage from its allocation to its free."""
    order = np.lexsort((uses.time, uses.storage))
    opens = uses.allocates[order]
    opens[:1] = True
    opens[1:] |= (uses.storage[order][1:] != uses.storage[order][:-1]) | uses.frees[order][:-1]
    return _numbered(order, opens)


def _by_overlap(uses: _Uses) -> Ints:
    """A number for each group of TensorImpls that were used on one storage address at overlapping times."""
    order = np.lexsort((uses.time, uses.impl, uses.storage))
    storage, impl = uses.storage[order], uses.impl[order]
    other = np.ones(len(order), np.bool_)
    other[1:] = (storage[1:] != storage[:-1]) | (impl[1:] != impl[:-1])
    begins = np.flatnonzero(other)
    pair = np.cumsum(other) - 1  # one per storage and TensorImpl
    first, last = uses.time[order][begins], np.maximum.reduceat(uses.end[order], begins) if len(begins) else begins
    by_time = np.lexsort((first, storage[begins]))
    first, last, storage = first[by_time], last[by_time], storage[begins][by_time]
    opens = np.ones(len(by_time), np.bool_)
    opens[1:] = (storage[1:] != storage[:-1]) | (first[1:] > _latest_so_far(last, storage)[:-1])
    numbers = np.empty(len(order), np.int64)
    numbers[order] = _numbered(by_time, opens)[pair]
    return numbers


def _latest_so_far(last: Ints, group: Addresses) -> Ints:
    """The running maximum within each stretch of equal groups."""
    ordered = np.sort(last)
    rank = np.searchsorted(ordered, last)
    stretch = np.zeros(len(last), np.int64)
    stretch[1:] = np.cumsum(group[1:] != group[:-1])
    highest = np.maximum.accumulate(rank + stretch * len(last)) - stretch * len(last)
    latest: Ints = ordered[highest]
    return latest


def _numbered(order: npt.NDArray[Any], opens: npt.NDArray[np.bool_]) -> Ints:
    """Numbers for stretches of sorted rows, by row."""
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(opens) - 1
    return numbers


def _joined(storage: Ints, impl: Addresses, count: int) -> Ints:
    """The numbers after joining all those that one TensorImpl had."""
    used = np.flatnonzero(impl)
    order = used[np.argsort(impl[used], kind="stable")]
    same = impl[order][1:] == impl[order][:-1]
    left, right = storage[order[:-1]][same], storage[order[1:]][same]
    label = np.arange(count)
    while True:
        lowest = label.copy()
        np.minimum.at(lowest, label[left], label[right])
        np.minimum.at(lowest, label[right], label[left])
        lowest = lowest[lowest]
        if np.array_equal(lowest, label):
            joined: Ints = label[storage]
            return joined
        label = lowest


def allocated_bytes(ops: Table, allocations: Table) -> Ints:
    """For each op (a row of cpu_op or user_annotation): bytes that it, and no op inside it, allocated less freed.

    Needs the external ids of attribution.
    """
    places = lookup(allocations["external_id"].astype(np.uint64), ops["id"].astype(np.uint64), np.arange(len(ops)), -1)
    own = np.flatnonzero(places >= 0)
    total = np.zeros(len(ops), np.int64)
    np.add.at(total, places[own], allocations["bytes"][own])
    return total
