"""The tree of user_calls in which what a framework's training loop calls has nodes, too.

Theory of operation
    Where a framework has the loop (train() of a trainer), all of the training is one call of the user's: one entry of
    user_calls. Such an entry, below which the training runs, is opened: every function of a library in it has a node,
    down to where a phase of the training begins, a library of a known kind is called, or the user's code is called
    back. All other entries stay as they are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.call_tree import CallTree, call_tree, inclusive
from kineto_trace.analysis.host_time.host_moments import NOTHING, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.step_functions import StepPhase
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.model.context import Context
from kineto_trace.structure.python.library_calls import CallKind

LOOP = 0.05  # of the time of the training below a node: then it belongs to the loop
TRAINING = (Class.FORWARD, Class.BACKWARD, Class.OPTIMIZER)

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FrameworkCalls(CallTree):
    """entry: the node of the entry that each node of an opened entry is in; NOTHING: the node is in none."""

    entry: Ints


def framework_calls(context: Context) -> FrameworkCalls:
    """Returns the tree of the training thread."""
    slices, calls, found = context.get(thread_slices), context.get(user_calls), context.get(moments)
    classes = context.get(moment_classes)
    node = calls.node[found.place]
    trains = np.isin(classes.kind, TRAINING)
    below = inclusive(calls, np.bincount(node[trains], found.weight[trains], len(calls)))
    loops = ~calls.user & (below > LOOP * float(found.weight[trains].sum()))
    name = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    user = np.zeros(len(slices), np.bool_)
    user[calls.user_slice[calls.user_slice == np.arange(len(slices))]] = True
    opened = loops[calls.node]
    aside = (calls.phase == StepPhase.NONE) & (calls.kind == CallKind.NONE) & ~calls.loading
    tree = call_tree(slices, name, user, opens=user | (opened & aside))
    in_opened = np.zeros(len(tree), np.bool_)
    in_opened[tree.node[opened]] = True
    entry = np.full(len(tree), NOTHING, np.int64)
    for place in np.flatnonzero(in_opened).tolist():
        above = int(tree.parent[place])
        entry[place] = entry[above] if above != NOTHING and entry[above] != NOTHING else place
    return FrameworkCalls(tree.name, tree.parent, tree.user, tree.node, entry)
