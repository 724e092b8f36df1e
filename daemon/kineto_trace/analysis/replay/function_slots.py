"""Which time of the training thread belongs to a function, as exactly as the operators that it calls.

Theory of operation
    Samples are some 10 ms apart, but steps repeat: the operators of a step, each told by its name and by how often that
    one ran before in the step, are the same in all of them. So a sample in one step tells the function of that operator
    in every step, and the samples of all steps together are close to each other. Each outermost operator is a slot, and
    so is the time since the one before it; a slot belongs to the functions in which most of its samples in all steps
    were, and one without a sample is like the nearest one of the step that has some. Between two operators of the same
    name a function seldom begins or ends, so that these are near each other; it is likely to where a forward that has a
    backward begins or ends, or an optimizer's step, so that those are far apart.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.framework_calls import framework_calls
from kineto_trace.analysis.host_time.host_moments import host_steps, moments
from kineto_trace.analysis.host_time.optimizer_steps import optimizer_steps
from kineto_trace.arrays.intervals import Union, containing, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.fwd_bwd import op_roles

SAME_NAME, OTHER_NAME, OTHER_ROLE = 0.01, 1.0, 1000.0  # how far an operator is from the one before it

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FunctionSlots:
    """start, end: of each slot (Unix ns), in order. place: among the slots of a step, in their usual order.

    sampled, node: for each sample the place of its slot, and the node of framework_calls. position: of each place,
    ascending; the nearest one with a sample tells about those without.
    """

    start: Ints
    end: Ints
    place: Ints
    sampled: Ints
    node: Ints
    position: Floats

    def of(self, nodes: Flags) -> Union:
        """Returns the time of the slots that belong to these nodes of framework_calls."""
        if not len(self.sampled):
            return union(self.sampled, self.sampled)
        position, count = self.position, len(self.position)
        seen = np.bincount(self.sampled, minlength=count)
        mine = np.bincount(self.sampled, nodes[self.node], minlength=count)
        known = np.flatnonzero(seen)
        after = np.minimum(np.searchsorted(known, np.arange(count)), len(known) - 1)
        before = np.maximum(after - 1, 0)
        nearer = position - position[known[before]] < position[known[after]] - position
        nearest = np.where(seen > 0, np.arange(count), np.where(nearer, known[before], known[after]))
        chosen = (2 * mine > seen)[nearest][self.place]
        return union(self.start[chosen], self.end[chosen])


def function_slots(context: Context) -> FunctionSlots:
    """Returns the slots of the training thread in its steps; none without operators or samples."""
    steps, table, tree = context.get(host_steps), context.trace.table("cpu_op"), context.get(ops)
    rows = np.flatnonzero((tree.nested.tree.parent[tree.place] < 0) & (table["thread"] == steps.thread))
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    start, end = table["start"][rows], table.end()[rows]
    step = steps.of(start)
    inside = step >= 0
    place = np.zeros(len(rows), np.int64)
    name = table["name"][rows]
    place[inside] = _places(name[inside], step[inside], (start - steps.start[step])[inside])
    borders = np.stack([np.minimum(np.concatenate([start[:1], end[:-1]]), start), start], axis=1).reshape(-1)
    ends, places, known = np.stack([start, end], axis=1).reshape(-1), np.repeat(2 * place, 2), np.repeat(inside, 2)
    places[1::2] += 1
    found = context.get(moments)
    slot = np.searchsorted(ends, found.time, side="right")
    votes = found.sure & (slot < len(ends))
    votes[votes] = known[slot[votes]]
    node = context.get(framework_calls).node[found.place[votes]]
    role = np.where(containing(*context.get(optimizer_steps), start) >= 0, -1, context.get(op_roles).linked[rows])
    position = _positions(place[inside], name[inside], role[inside])
    return FunctionSlots(borders[known], ends[known], places[known], places[slot[votes]], node, position)


def _positions(place: Ints, name: npt.NDArray[np.int32], role: Ints) -> Floats:
    """Returns FunctionSlots.position. place: of each operator among those of a step; role: what only its like have."""
    if not len(place):
        return np.empty(0)
    names, roles = (np.zeros(int(place.max()) + 1, np.int64) for _ in range(2))
    names[place], roles[place] = name, role
    far = np.where(np.diff(names) != 0, OTHER_NAME, SAME_NAME)
    far[np.diff(roles) != 0] = OTHER_ROLE
    of_ops = np.concatenate([[0.0], np.cumsum(far)])
    before = np.concatenate([[-OTHER_NAME / 2], (of_ops[:-1] + of_ops[1:]) / 2])
    return np.stack([before, of_ops], axis=1).reshape(-1)


def _places(name: npt.NDArray[np.int32], step: Ints, time: Ints) -> Ints:
    """Numbers the operators of steps by their names and how often each ran before in its step, in order of `time`."""
    groups = group([step, name.astype(np.int64)])
    order = np.argsort(groups.number, kind="stable")
    ordered = groups.number[order]
    before = np.empty(len(name), np.int64)
    before[order] = np.arange(len(name)) - np.searchsorted(ordered, ordered)
    alike = group([name.astype(np.int64), before])
    count = np.bincount(alike.number, minlength=len(alike))
    mean = np.bincount(alike.number, time, len(alike)) / np.maximum(count, 1)
    rank = np.empty(len(alike), np.int64)
    rank[np.argsort(mean, kind="stable")] = np.arange(len(alike))
    places: Ints = rank[alike.number]
    return places
