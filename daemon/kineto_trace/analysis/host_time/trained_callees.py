"""Moments at which a user's function was in an operator with a backward, as the samples' callees tell.

Theory of operation
    A slice of a function that calls many operators counts many samples, and only the first one's time is known. The
    callees of the others ("loss.mean", "torch.matmul") name their operators. If nearly all operators of that name on
    the training thread have a backward, those samples are a part of the forward. A method of another class may have
    the same name: then its samples have more time than those operators, and tell nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.host_moments import NOTHING, host_steps, moments, thread_slices
from kineto_trace.analysis.host_time.user_callees import slice_callees
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.arrays.row_groups import places_by_value
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.op_roles import op_roles
from kineto_trace.structure.python.library_calls import CallKind

NEARLY_ALL = 0.9  # of the operators of a name
LONGER = 2  # than the operators: what calling them takes
FEW = 4  # samples more than that are chance

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainedCallees:
    """callee: per name of slice_callees, whether its samples are in operators with a backward; moment: per moment."""

    callee: Flags
    moment: Flags


def trained_callees(context: Context) -> TrainedCallees:
    """Returns which callees of the user's functions are such operators, and which moments count for them."""
    told, found, calls = context.get(slice_callees), context.get(moments), context.get(user_calls)
    slices = len(context.get(thread_slices))
    chosen, took = np.zeros(len(found), np.bool_), _took(context, told.names)
    own = (calls.kind == CallKind.NONE) & (calls.user_slice == np.arange(slices))
    use = np.flatnonzero(own[told.place])
    weight = np.bincount(found.place, found.weight, slices)
    spent = np.bincount(told.name[use], weight[told.place[use]] * told.share[use], len(took))
    callee: Flags = (took > 0) & (spent <= LONGER * took + FEW * weight.sum() / max(len(found), 1))
    use = use[callee[told.name[use]]]
    share = np.minimum(np.bincount(told.place[use], told.share[use], slices), 1.0)
    mine = np.flatnonzero(share[found.place] > 0)
    for place, rows in places_by_value(found.place[mine].astype(np.int64)):
        count = round(float(share[place]) * len(rows))
        chosen[mine[rows[len(rows) - count :]]] = True
    return TrainedCallees(callee, chosen)


def _took(context: Context, names: list[str]) -> Floats:
    """For each callee the time (ns) of the operators of its name, 0 if they are not nearly all with a backward."""
    table, window, tree = context.trace.table("cpu_op"), context.get(host_steps), context.get(ops)
    outermost = (tree.nested.tree.parent[tree.place] < 0) & (table["thread"] == window.thread)
    rows = np.flatnonzero(outermost)
    rows = rows[window.of(table["start"][rows]) >= 0]
    linked, name = context.get(op_roles).linked[rows], table["name"][rows]
    count = len(context.trace.strings)
    total, trained = np.bincount(name, minlength=count), np.bincount(name, linked, count)
    time = np.bincount(name, table["duration"][rows] * linked, count) * (trained >= NEARLY_ALL * np.maximum(total, 1))
    place = {context.trace.strings[number]: number for number in np.flatnonzero(time > 0).tolist()}
    at = [place.get("aten::" + text.rpartition(".")[2], NOTHING) if "." in text else NOTHING for text in names]
    return np.append(time, 0.0)[np.array(at, np.int64)] if at else np.zeros(0)
