"""The tensors of a trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import lookup
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, Ints32, UInts32, UInts64
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES, Table
from kineto_trace.structure.allocations import memory_records
from kineto_trace.structure.event_arguments import arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

UNKNOWN_SIZE = -1
TENSOR_LIST = "TensorList"
NO_TENSORS = frozenset({"", "Scalar", "ScalarList"})
# Names of types as the profiler shows them (C++'s and caffe2's), bytes.
ITEM_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "short": 2, "short int": 2, "bool": 1, "char": 1,
    "signed char": 1, "unsigned char": 1, "c10::Half": 2, "c10::BFloat16": 2, "c10::complex<float>": 8,
    "c10::complex<double>": 16, "c10::complex<c10::Half>": 4, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1, "unsigned short": 2, "unsigned int": 4, "unsigned long": 8,
}  # fmt: skip
NO_TENSOR = -1
NO_STORAGE = 0

Addresses = UInts64


@view(
    "tensors",
    columns(
        ("tensor", "int", "", "number of the tensor, counted from 0"),
        (
            "size_bytes",
            "int",
            "bytes",
            "size of its memory block; if unknown, computed from its shape at the first use",
        ),
        ("size_is_exact", "bool", "", "whether size_bytes is the size of the block"),
        (
            "device",
            "text",
            "",
            "CPU, GPU0, …; missing if its block was neither allocated nor released during the recording",
        ),
        ("made_by", "text", "", "operator that allocated its block"),
        ("uses", "int", "", "number of times it was an input of an operator"),
        ("first_used_by", "text", "", "first operator that had it as an input"),
        ("last_used_by", "text", "", "last operator that had it as an input"),
        ("allocation_us", "float", "us", "time from the start of the window to its allocation"),
        ("first_use_us", "float", "us", "time from the start of the window to the start of its first use"),
        ("last_use_us", "float", "us", "time from the start of the window to the end of its last use"),
        ("release_us", "float", "us", "time from the start of the window to its release"),
        ("unused_us", "float", "us", "time from the last use to the release"),
        ("address", "int", "", "address of its storage"),
    ),
)
def tensors(context: Context) -> Answer:
    """The distinct tensors of a trace: where they came from, which operators used them, and how long they were held.

    Tensors that share storage (views) count as one. If the trace has allocations, a storage is one tensor from its
    allocation to its release; otherwise inputs with the same address whose uses overlap in time are one tensor. Tensors
    are numbered by first appearance.

    Traces read from files do not contain the addresses of inputs. Their rows are the blocks of memory that operators
    allocated, and the operators that used them are unknown.
    """
    found, records = context.get(tensor_uses), context.get(memory_records)
    notes = []
    if not len(found):
        notes.append("the trace has no tensors: record with record_shapes=True or profile_memory=True")
    elif not found.from_inputs:
        notes.append(
            "the trace lacks the addresses of inputs: the rows are blocks of memory, and their uses are unknown"
        )
    strings = np.array([*context.trace.strings, None], object)
    names = np.append(found.names, NOTHING)
    start = context.trace.window_start_ns

    def since(time: Ints) -> Floats:
        return np.where(time >= 0, (time - start) / 1000, np.nan)

    unused = (found.released >= 0) & (found.last_use >= 0)
    return Answer(
        {
            "tensor": np.arange(len(found)),
            "size_bytes": np.where(found.size == UNKNOWN_SIZE, np.nan, found.size),
            "size_is_exact": found.exact,
            "device": np.array([*records.devices, None], object)[found.device],
            "made_by": strings[names[found.maker]],
            "uses": found.uses.astype(object) if found.from_inputs else [None] * len(found),
            "first_used_by": strings[names[found.first_op]],
            "last_used_by": strings[names[found.last_op]],
            "allocation_us": since(found.allocated),
            "first_use_us": since(found.first_use),
            "last_use_us": since(found.last_use),
            "release_us": since(found.released),
            "unused_us": np.where(unused, (found.released - found.last_use) / 1000, np.nan),
            "address": found.address.view(np.int64),
        },
        notes,
    )


# What is known about each tensor of a trace: when it was used, by which operators, its size and its origin.
# Theory of operation
# tensor_ids.py numbers the tensors among the inputs of operators. A tensor's size is that of the block that was
# allocated for its storage; without allocations in the trace, that of its shape and type at its first use, which for a
# view is less than the storage. The operator that allocated the block made the tensor.
# A file does not have addresses of inputs. Then the blocks of memory are the tensors, and the only known operators are
# those that allocated them.
@dataclass(frozen=True, slots=True)
class Tensors:
    """One value per tensor. Times Unix ns; NOTHING in rows and times means unknown or none.

    first_op, last_op: places in `names` of the first and last operator that had it as an input.
    maker: place of the operator that allocated it.
    first_use: start of the first one.
    last_use: the latest end of any.
    size: bytes, or UNKNOWN_SIZE.
    exact: whether the size is that of its block.
    address: of its storage.
    from_inputs: False if these are blocks of memory.
    """

    uses: Ints
    first_use: Ints
    last_use: Ints
    first_op: Ints
    last_op: Ints
    maker: Ints
    size: Ints
    exact: Flags
    device: Ints
    allocated: Ints
    released: Ints
    address: UInts64
    names: Ints32
    from_inputs: bool

    def __len__(self) -> int:
        return len(self.uses)


def tensor_uses(context: Context) -> Tensors:
    """Returns all tensors, in the order of their numbers."""
    trace, records = context.trace, context.get(memory_records)
    ops = [trace.table(kind) for kind in OP_TABLES]
    names = np.concatenate([table["name"] for table in ops])
    inputs = trace.table("op_tensor")
    if len(inputs):
        ids = tensor_ids(trace.tables)
        of_record, count = ids.allocations[records.row] if len(records) else np.empty(0, np.int64), ids.count
    else:
        allocating = records.bytes > 0
        of_record = np.where(allocating, np.cumsum(allocating) - 1, NOTHING)
        paired = (~allocating) & (records.other != NOTHING)
        of_record[paired] = of_record[records.other[paired]]
        count = int(allocating.sum())
    found = _empty(count, names, from_inputs=len(inputs) > 0)
    _add_blocks(found, of_record, records)
    if len(inputs):
        _add_uses(context, found, ids.inputs)
    return found


def _empty(count: int, names: Ints32, *, from_inputs: bool) -> Tensors:
    unknown = [np.full(count, NOTHING, np.int64) for _ in range(9)]
    return Tensors(
        uses=np.zeros(count, np.int64),
        first_use=unknown[0],
        last_use=unknown[1],
        first_op=unknown[2],
        last_op=unknown[3],
        maker=unknown[4],
        size=unknown[5],
        exact=np.zeros(count, np.bool_),
        device=unknown[6],
        allocated=unknown[7],
        released=unknown[8],
        address=np.zeros(count, np.uint64),
        names=names,
        from_inputs=from_inputs,
    )


def _add_blocks(found: Tensors, of_record: Ints, records: Any) -> None:
    """Adds the allocator's data; of several allocations of one tensor the first one counts, of releases the last."""
    known = of_record >= 0
    made = np.flatnonzero(known & (records.bytes > 0))[::-1]
    tensor = of_record[made]
    found.allocated[tensor], found.size[tensor] = records.time[made], records.bytes[made]
    found.maker[tensor], found.device[tensor] = records.op[made], records.device[made]
    found.address[tensor], found.exact[tensor] = records.address[made], True
    freed = np.flatnonzero(known & (records.bytes <= 0))
    found.released[of_record[freed]] = records.time[freed]
    found.device[of_record[freed]] = records.device[freed]
    unseen = freed[~found.exact[of_record[freed]]]
    found.size[of_record[unseen]] = -records.bytes[unseen]
    found.address[of_record[unseen]] = records.address[unseen]
    found.exact[of_record[unseen]] = True


def _add_uses(context: Context, found: Tensors, ids: Ints) -> None:
    """Adds the uses as inputs of operators."""
    trace = context.trace
    inputs, ops = trace.table("op_tensor"), [trace.table(kind) for kind in OP_TABLES]
    op_ids, start, end = (
        np.concatenate(parts) for parts in ([t["id"] for t in ops], [t["start"] for t in ops], [t.end() for t in ops])
    )
    op = lookup(inputs["op"].astype(np.uint64), op_ids.astype(np.uint64), np.arange(len(op_ids)), NOTHING)
    rows = np.flatnonzero((ids >= 0) & (op >= 0))
    rows = rows[np.lexsort((inputs["position"][rows], start[op[rows]]))]
    tensor, op = ids[rows], op[rows]
    found.uses[:] = np.bincount(tensor, minlength=len(found))
    found.first_use[tensor[::-1]], found.first_op[tensor[::-1]] = start[op][::-1], op[::-1]
    found.last_op[tensor] = op
    np.maximum.at(found.last_use, tensor, end[op])
    plain = np.flatnonzero(inputs["storage"][rows] != 0)[::-1]
    unseen = plain[~found.exact[tensor[plain]]]
    found.address[tensor[unseen]] = inputs["storage"][rows[unseen]]
    first = np.full(len(found), NOTHING, np.int64)
    first[tensor[::-1]] = rows[::-1]
    wanted = np.flatnonzero((first >= 0) & ~found.exact)
    found.size[wanted] = _shape_sizes(context, found.first_op[wanted], inputs["position"][first[wanted]])


def _shape_sizes(context: Context, op: Ints, position: UInts32) -> Ints:
    """Bytes of the tensors at these positions among the tensors of operators' inputs, by shape and type."""
    trace = context.trace
    offset, sizes_of, of_op = 0, [np.full(1, UNKNOWN_SIZE)], []
    for kind in OP_TABLES:
        parsed = arguments(context, kind)
        each = [_sizes(found) for found in parsed.objects]
        begins = offset + 1 + np.cumsum([0, *(len(sizes) for sizes in each)])
        counts = np.array([*(len(sizes) for sizes in each), 0], np.int64)
        of_op.append(np.stack([begins[parsed.text], counts[parsed.text]]))
        sizes_of += each
        offset = int(begins[-1]) - 1
    assert len(trace.table(OP_TABLES[0])) + len(trace.table(OP_TABLES[1])) == sum(part.shape[1] for part in of_op)
    flat, (first, count) = np.concatenate(sizes_of), np.concatenate(of_op, axis=1)[:, op]
    return np.where(position < count, flat[np.minimum(first + position, len(flat) - 1)], UNKNOWN_SIZE)


def _sizes(found: dict[str, Any]) -> Ints:
    """Returns the sizes of all tensors of one call, in their order."""
    sizes: list[int] = []
    for kind, dims in zip(found.get("Input type", []), found.get("Input Dims", []), strict=False):
        if kind == TENSOR_LIST and isinstance(dims, list):
            sizes += [UNKNOWN_SIZE] * len(dims)
        elif kind not in NO_TENSORS:
            known = kind in ITEM_BYTES and isinstance(dims, list) and all(isinstance(n, int) for n in dims)
            sizes.append(int(np.prod(dims, dtype=np.float64)) * ITEM_BYTES[kind] if known else UNKNOWN_SIZE)
    return np.array(sizes, np.int64)


# Which inputs of ops are the same tensor, and which memory an op allocated.
# Theory of operation
# An input has two addresses, that of its TensorImpl and that of its storage's data; both are reused for other tensors.
# Tensors that share storage (views) count as one, as in PyTorch's own unique ids.
# With allocation events, a storage address is one tensor from its allocation (or from the beginning) until its free; an
# allocation of a block whose free was not seen also begins a new one. This is PyTorch's rule. PyTorch also joins the
# storages that one TensorImpl had. It keeps every TensorImpl alive while it records, so that an address identifies one
# of them. An observer that only reads addresses must not do this: temporary views come and go at the same addresses all
# the time. `impls_are_kept` distinguishes the two. PyTorch takes all tensors that had no storage at some time for one
# tensor, with their later storage; `impls_are_kept` does so too, otherwise a tensor without storage is identified by
# its TensorImpl alone.
# Without allocation events nothing shows when storage was freed. Then two TensorImpls on one storage address are the
# same tensor if the times from their first to their last use overlap; otherwise the address was reused. A view that is
# first used after the last use of its base counts as another tensor, and a tensor that has both addresses of an earlier
# one counts as that one.
@dataclass(frozen=True, slots=True)
class TensorIds:
    """Numbers of tensors, from 0 on in the order of their first appearance; NO_TENSOR if not known to be one.

    inputs: per row of op_tensor.
    allocations: per row of cpu_instant_event.
    """

    inputs: Ints
    allocations: Ints
    count: int


@dataclass(frozen=True, slots=True)
class _Uses:
    """All events of storage addresses: uses as inputs first, then allocations and frees. Times in Unix ns."""

    storage: Addresses
    impl: Addresses  # 0: an allocation or a free
    time: Ints
    end: Ints  # of the op
    allocates: Flags
    frees: Flags


def tensor_ids(tables: Mapping[str, Table], *, impls_are_kept: bool = False) -> TensorIds:
    """Returns the tensors of a trace. Inputs of ops that are not in the trace do not count."""
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
    """Returns the inputs whose ops are in the trace, and the starts and ends of these ops."""
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
    """Returns the uses and the allocator's events."""
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
    """Returns a number for each storage from its allocation to its free."""
    order = np.lexsort((uses.time, uses.storage))
    opens = uses.allocates[order]
    opens[:1] = True
    opens[1:] |= (uses.storage[order][1:] != uses.storage[order][:-1]) | uses.frees[order][:-1]
    return _numbered(order, opens)


def _by_overlap(uses: _Uses) -> Ints:
    """Returns a number for each group of TensorImpls that were used on one storage address at overlapping times."""
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
    """Returns the running maximum within each run of equal groups."""
    ordered = np.sort(last)
    rank = np.searchsorted(ordered, last)
    stretch = np.zeros(len(last), np.int64)
    stretch[1:] = np.cumsum(group[1:] != group[:-1])
    highest = np.maximum.accumulate(rank + stretch * len(last)) - stretch * len(last)
    latest: Ints = ordered[highest]
    return latest


def _numbered(order: AnyArray, opens: Flags) -> Ints:
    """Returns numbers for runs of sorted rows, by row."""
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(opens) - 1
    return numbers


def _joined(storage: Ints, impl: Addresses, count: int) -> Ints:
    """Returns the numbers after joining all those that one TensorImpl had."""
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
    """Returns for each op (row of cpu_op or user_annotation) the bytes that it allocated less freed, without nested
    ops.

    Needs the external ids of attribution.
    """
    places = lookup(allocations["external_id"].astype(np.uint64), ops["id"].astype(np.uint64), np.arange(len(ops)), -1)
    own = np.flatnonzero(places >= 0)
    total = np.zeros(len(ops), np.int64)
    np.add.at(total, places[own], allocations["bytes"][own])
    return total
