"""The operator tree of the TensorBoard plug-in and its figures, by its exact rules (its last version).

Theory of operation
    Per thread, in the order of start and then of the latest end, a node is a child of the innermost node that has
    not ended when it starts. A node that outlives that one is dropped; what is inside it is not.

    A node whose only child has the same name, both being operators, takes the place of that child: it has the
    child's children and calls, its own calls are lost. In preorder such a child stands right behind its parent, so
    that chains of them are stretches. The tree here (`Tree`) is what is left, in preorder.

    A call belongs to the node with its external id: of several the first one, in the order of threads' first nodes
    and then of starts, even if it was dropped or replaced, when nobody has the call. A call without an external id
    belongs to no node. GPU activities belong to the call with their correlation id.

    host self is the total less the children and less the own calls; device total is the plain sum of all GPU
    activities below. A node of the type operator is eligible for tensor cores by its name, by a kernel of its own
    calls, or if a child is.

    Backward operators: plugin_backward.py moves them; `visits` says how often the plug-in visits each node when it
    collects the operators.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import OVERLAPS, Events, Interner
from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.compat.tensorboard.plugin_nodes import (
    NO_OPERATORS,
    NOTHING,
    Node,
    Nodes,
    PluginLaunches,
    launches,
    nodes,
    orderable,
)
from kineto_trace.compat.tensorboard.plugin_tensor_names import plugin_eligible_names, plugin_tensor_names
from kineto_trace.model.context import Context

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tree:
    """One value per node, in preorder, thread by thread. Times are doubles in µs.

    kind: Node; table, row: where it is from, as in Nodes. track: number of the thread, in the order of the threads'
    first nodes. parent: node; NOTHING: the root of the thread. stop: the node after the last one below it.
    typed: its event is of the type Operator. operator: it counts as an operator. dropped: nodes that had no place.
    activity: per GPU activity in the order of `launches` the node that it belongs to; NOTHING: none.
    """

    kind: npt.NDArray[np.uint8]
    table: npt.NDArray[np.uint8]
    row: Ints
    name: npt.NDArray[np.int32]
    thread: Ints
    track: Ints
    start: Floats
    end: Floats
    parent: Ints
    stop: Ints
    typed: Flags
    operator: Flags
    host_self: Floats
    device_self: Floats
    device_total: Floats
    tensor_self: Floats
    tensor_total: Floats
    eligible: Flags
    activity: Ints
    dropped: int

    def __len__(self) -> int:
        return len(self.kind)

    def below(self, values: npt.NDArray[np.generic]) -> Floats:
        """Returns for each node the sum over it and all below it."""
        return _below(values, self.stop)


def subtrees(tree: Tree, roots: Ints) -> tuple[Ints, Ints]:
    """Returns these roots and all nodes inside them, and for each the place of its root in `roots`."""
    sizes = tree.stop[roots] - roots
    which = np.repeat(np.arange(len(roots)), sizes)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return roots[which] + offset, which


def _below(values: npt.NDArray[np.generic], stop: Ints) -> Floats:
    running = np.zeros(len(values) + 1)
    np.cumsum(values, out=running[1:])
    found: Floats = running[stop] - running[:-1]
    return found


def plugin_tree(context: Context) -> Tree:
    """Returns the tree of all threads, without its backward part."""
    found = nodes(context)
    launched = context.get(launches)
    track, order = _sorted(found)
    events = Events(track[order], orderable(found.start[order]), orderable(found.end[order]))
    kept = events.contain() != OVERLAPS
    order = order[kept]
    tree = events.take(np.flatnonzero(kept)).nest(0)
    merged, top = _chains(tree.parent, tree.children, found.name[order], found.typed[order])
    place = np.flatnonzero(~merged)  # of the nodes that are left
    left_before = np.concatenate([[0], np.cumsum(~merged)])
    number = left_before[1:] - 1
    bottom = np.append(place, len(order))[1:] - 1
    call_node = _owners(found, launched, track)
    position = np.full(len(found.kind) + 1, NOTHING)  # of each given node among those left; NOTHING: its calls are lost
    position[order[bottom]] = np.arange(len(place))
    owner = position[call_node]
    left = order[place]
    above = tree.parent[place]
    parent = np.where(above >= 0, number[top[above]], NOTHING)
    stop = left_before[tree.stop[place]]
    return _figures(context, found, launched, _Shape(left, track[left], parent, stop, owner), kept)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The nodes that are left (places in Nodes) and how they hang together; owner: the node of each call."""

    left: Ints
    track: npt.NDArray[np.uint32]
    parent: Ints
    stop: Ints
    owner: Ints


def _sorted(found: Nodes) -> tuple[npt.NDArray[np.uint32], Ints]:
    """Returns each node's track (its thread's number, by the first node), and the order of the nodes."""
    by_time = np.argsort(found.start, kind="stable")
    track = np.empty(len(by_time), np.uint32)
    track[by_time] = Interner().intern(found.thread[by_time].view(np.uint64))
    order = by_time[Events(track[by_time], orderable(found.start[by_time]), orderable(found.end[by_time])).order()]
    return track, order


def _chains(
    parent: npt.NDArray[np.int32], children: npt.NDArray[np.int32], name: npt.NDArray[np.int32], typed: Flags
) -> tuple[Flags, Ints]:
    """Tells which nodes are replaced by their parents, and returns for each node the first one of its chain."""
    inside = parent >= 0
    merged = (
        inside & (children[parent] == 1) & (name[parent] == name) & typed & typed[parent] if len(parent) else inside
    )
    top: Ints = np.maximum.accumulate(np.where(merged, 0, np.arange(len(parent))))
    return merged, top


def _owners(found: Nodes, launched: PluginLaunches, track: npt.NDArray[np.uint32]) -> Ints:
    """Returns for each call the node (of those given) with its external id, or NOTHING."""
    rows = np.argsort(found.start, kind="stable")
    small = track.astype(np.uint16) if int(track.max(initial=0)) < 1 << 16 else track  # sorts by radix
    rows = rows[np.argsort(small[rows], kind="stable")][::-1]  # of equal ids the last one counts in lookup()
    keys, wanted = ((ids + 1).astype(np.uint64) for ids in (found.external[rows], launched.external))
    owner: Ints = lookup(wanted, keys, rows, NOTHING)
    return owner


def _figures(context: Context, found: Nodes, launched: PluginLaunches, shape: _Shape, kept: Flags) -> Tree:
    count, left = len(shape.left), shape.left
    start, end, name, typed = found.start[left], found.end[left], found.name[left], found.typed[left]
    total = end - start
    called = np.flatnonzero(shape.owner >= 0)
    in_calls = _sums(shape.owner[called], launched.duration[called], count)
    inside = np.flatnonzero(shape.parent >= 0)
    in_children = _sums(shape.parent[inside], total[inside], count)
    activity = np.where(launched.call >= 0, np.append(shape.owner, NOTHING)[launched.call], NOTHING)
    own = activity >= 0
    tensor = own & context.get(plugin_tensor_names)[launched.name]  # by the name alone, also of copies and fills
    device = _sums(activity[own], launched.device_duration[own], count)
    tensor_self = _sums(activity[tensor], launched.device_duration[tensor], count)
    eligible = context.get(plugin_eligible_names)[name] | (typed & (tensor_self > 0))
    return Tree(
        kind=found.kind[left],
        table=found.table[left],
        row=found.row[left],
        name=name,
        thread=found.thread[left],
        track=shape.track.astype(np.int64),
        start=start,
        end=end,
        parent=shape.parent,
        stop=shape.stop,
        typed=typed,
        operator=(found.kind[left] == Node.OPERATOR) & typed & ~_excluded(context)[name],
        host_self=total - in_children - in_calls,
        device_self=device,
        device_total=_below(device, shape.stop),
        tensor_self=tensor_self,
        tensor_total=_below(tensor_self, shape.stop),
        eligible=_passed_up(eligible, shape.parent, typed),
        activity=activity,
        dropped=int(np.count_nonzero(~kept)),
    )


def _sums(node: Ints, values: Floats, count: int) -> Floats:
    """Returns the sum of the values of each node."""
    return np.bincount(node, weights=values, minlength=count).astype(np.float64)


def _excluded(context: Context) -> Flags:
    """Tells for each string whether an operator of that name does not count as one."""
    texts = context.trace.strings
    return np.array([text in NO_OPERATORS or text.startswith("Optimizer.") for text in texts], np.bool_)


def _passed_up(eligible: Flags, parent: Ints, typed: Flags) -> Flags:
    """Makes nodes of the type operator eligible if a child is, level by level upwards, until nothing changes."""
    eligible = eligible.copy()
    waiting = np.flatnonzero(eligible & (parent >= 0))
    while len(waiting):
        above = unique_values(parent[waiting])
        fresh = above[typed[above] & ~eligible[above]]
        eligible[fresh] = True
        waiting = fresh[parent[fresh] >= 0]
    return eligible
