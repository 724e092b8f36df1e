"""What is known of each tensor of a trace: when it was used, by which operators, how large it is, where it came from.

Theory of operation
    tensor_ids.py numbers the tensors among the inputs of operators. A tensor's size is that of the block that was
    allocated for its storage; without allocations in the trace, that of its shape and type at its first use, which of
    a view is less than the storage. The operator that allocated the block is the one that made the tensor.

    A file does not have addresses of inputs. Then the blocks of memory are the tensors, and operators are known only
    as what allocated them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.memory.tensor_ids import tensor_ids
from kineto_trace.arrays.id_sets import lookup
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES
from kineto_trace.structure.allocations import memory_records
from kineto_trace.structure.event_arguments import arguments

NOTHING = -1
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

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tensors:
    """One value per tensor. Times Unix ns; NOTHING in rows and times: unknown or none.

    first_op, last_op: places in `names` of the first and last operator that had it as an input; maker: of the one
    that allocated it. first_use: start of the first one; last_use: the latest end of any. size: bytes, UNKNOWN_SIZE.
    exact: the size is that of its block. address: of its storage. from_inputs: False if these are blocks of memory.
    """

    uses: Ints
    first_use: Ints
    last_use: Ints
    first_op: Ints
    last_op: Ints
    maker: Ints
    size: Ints
    exact: npt.NDArray[np.bool_]
    device: Ints
    allocated: Ints
    released: Ints
    address: npt.NDArray[np.uint64]
    names: npt.NDArray[np.int32]
    from_inputs: bool

    def __len__(self) -> int:
        return len(self.uses)


def tensor_uses(context: Context) -> Tensors:
    """All tensors, in the order of their numbers."""
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


def _empty(count: int, names: npt.NDArray[np.int32], *, from_inputs: bool) -> Tensors:
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
    """What the allocator tells; of several allocations of one tensor the first one counts, of releases the last."""
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
    """What the inputs of operators tell."""
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


def _shape_sizes(context: Context, op: Ints, position: npt.NDArray[np.uint32]) -> Ints:
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
    """The sizes of all tensors of one call, in their order."""
    sizes: list[int] = []
    for kind, dims in zip(found.get("Input type", []), found.get("Input Dims", []), strict=False):
        if kind == TENSOR_LIST and isinstance(dims, list):
            sizes += [UNKNOWN_SIZE] * len(dims)
        elif kind not in NO_TENSORS:
            known = kind in ITEM_BYTES and isinstance(dims, list) and all(isinstance(n, int) for n in dims)
            sizes.append(int(np.prod(dims, dtype=np.float64)) * ITEM_BYTES[kind] if known else UNKNOWN_SIZE)
    return np.array(sizes, np.int64)
