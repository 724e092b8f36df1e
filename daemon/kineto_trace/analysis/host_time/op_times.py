"""How long each operator took: on the host and on the device, with and without the operators inside it.

Theory of operation
    The operators of a thread, sorted by start with the enclosing one first, are their tree in preorder, so that the
    sum over an operator and all below it is a difference of running sums. Everything is integer ns.

    What a GPU activity took belongs to the operator that is the innermost one around its call (parts.gpu). Sums are
    plain sums: activities that ran at the same time count each, as in PyTorch's own tables.

    A call inside another call (a driver call inside a runtime call) took no host time of its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.row_groups import subtree_sums, sums
from kineto_trace.kernel_traits.tensor_cores import eligible_op_names, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, NOTHING, calls, gpu, ops

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OpTimes:
    """One value per row of cpu_op, times in ns.

    host_total: from start to end. host_exclusive: less the operators inside. host_self: less its own calls to the
    runtime and driver too. device_self: of the GPU activities that its own calls caused; device_total: and those
    of the operators inside.
    """

    host_total: Ints
    host_exclusive: Ints
    host_self: Ints
    device_self: Ints
    device_total: Ints


def op_times(context: Context) -> OpTimes:
    """The times of all operators."""
    tree = context.get(ops)
    events, nest, count = tree.nested.events, tree.nested.tree, len(tree.row)
    exclusive = nest.self_time[tree.place]
    activity = context.get(gpu)
    owned = activity.op >= 0
    op, took = activity.op[owned], (activity.end - activity.start)[owned]
    device = sums(op, took, count)
    return OpTimes(
        host_total=(nest.end - events.start)[tree.place],
        host_exclusive=exclusive,
        host_self=np.maximum(exclusive - _own_calls(context, count), 0),  # calls may outlive operators
        device_self=device,
        device_total=subtree_sums(device[tree.row], nest.stop)[tree.place],
    )


def _own_calls(context: Context, count: int) -> Ints:
    """What each operator spent in calls that it made itself, ns."""
    called = context.get(calls)
    if not len(called):
        return np.zeros(count, np.int64)
    order = Events(called.thread, called.start, called.end).order()
    start, end, thread = called.start[order], called.end[order], called.thread[order]
    # Tracks one behind the other on one axis, so that a running maximum does not reach from one to the next.
    low, length = int(start.min()), int(end.max()) - int(start.min()) + 1
    turn = np.zeros(len(order), np.int64)
    np.cumsum(thread[1:] != thread[:-1], out=turn[1:])
    if (int(turn[-1]) + 1) * length < 2**62:
        reach = np.maximum.accumulate(end - low + turn * length)
        begin = start - low + turn * length
    else:  # absurd times
        reach, begin = np.maximum.accumulate(end), start
    outer = np.ones(len(order), np.bool_)
    outer[1:] = begin[1:] >= reach[:-1]
    mine = order[outer & (called.op[order] != NOTHING)]
    return sums(called.op[mine], called.end[mine] - called.start[mine], count)


@dataclass(frozen=True, slots=True)
class TensorTimes:
    """One value per row of cpu_op. own, total: like the device times of OpTimes (ns), of kernels with tensor cores.

    eligible: it or an operator inside it could use tensor cores, by its name, or did.
    """

    own: Ints
    total: Ints
    eligible: npt.NDArray[np.bool_]


def tensor_times(context: Context) -> TensorTimes:
    """What tensor cores did for each operator."""
    tree, activity = context.get(ops), context.get(gpu)
    stop = tree.nested.tree.stop
    chosen = (activity.op >= 0) & (activity.kind == KERNEL) & context.get(uses_tensor_cores)[activity.name]
    own = sums(activity.op[chosen], (activity.end - activity.start)[chosen], len(tree.row))
    eligible = context.get(eligible_op_names)[context.trace.table("cpu_op")["name"]] | (own > 0)
    return TensorTimes(
        own=own,
        total=subtree_sums(own[tree.row], stop)[tree.place],
        eligible=subtree_sums(eligible[tree.row], stop)[tree.place] > 0,
    )
