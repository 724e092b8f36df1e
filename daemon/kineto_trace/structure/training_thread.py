"""Which thread trains: the rule that all analyses of the host share.

Theory of operation
    The thread of most steps trains; steps that were recorded as a whole count before others. A trace without steps has
    operators: the thread with most time in them, without what autograd runs backward on threads of its own. Without
    operators it is the thread that launches most work of the GPU, otherwise the one that Python was busy on for longest
    (in samples that were not idle, or in recorded calls).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.row_groups import sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops, steps, whole_steps
from kineto_trace.structure.fwd_bwd import EVALUATE_FUNCTION
from kineto_trace.structure.python.python_frames import python_tree

NO_THREAD = 0

Ints = npt.NDArray[np.int64]
Weighted = tuple[npt.NDArray[np.uint32], Ints]  # threads, any number of times, and what counts for each


def training_thread(context: Context) -> int:
    """Returns the thread that trains; NO_THREAD: nothing of the trace has a thread."""
    for rule in _RULES:
        thread, weight = rule(context)
        if weight.any():
            threads, place = np.unique(thread, return_inverse=True)
            return int(threads[np.argmax(sums(place.reshape(-1), weight, len(threads)))])
    return NO_THREAD


def _of_steps(context: Context) -> Weighted:
    found = context.get(whole_steps)
    found = found if len(found) else context.get(steps)
    return found.thread, np.ones(len(found), np.int64)


def _of_operators(context: Context) -> Weighted:
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in context.trace.strings], np.bool_)
    forward = (tree.nested.tree.parent[tree.place] < 0) & (table["forward_thread"] == 0)
    rows = np.flatnonzero(forward)
    rows = rows[~evaluates[table["name"][rows]]]
    return table["thread"][rows], table["duration"][rows]


def _of_launches(context: Context) -> Weighted:
    call = context.get(gpu).call
    thread = context.get(calls).thread[call[call >= 0]]
    return thread, np.ones(len(thread), np.int64)


def _of_python(context: Context) -> Weighted:
    table = context.trace.table("python_function")
    if table["self_samples"].any():
        return table["thread"], table["self_samples"].astype(np.int64) - table["idle"]
    nested = context.get(python_tree)
    rows = nested.order[nested.tree.parent < 0]
    return table["thread"][rows], table["duration"][rows]


_RULES: tuple[Callable[[Context], Weighted], ...] = (_of_steps, _of_operators, _of_launches, _of_python)
