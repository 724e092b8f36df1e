"""What each operator is in the training: a part of the forward that has a backward, of a backward, or neither."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import in_subtrees
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.fwd_bwd import EVALUATE_FUNCTION, forward_backward

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OpRoles:
    """Per row of cpu_op: whether its outermost operator has a backward; whether it is, or is inside, a backward."""

    linked: Flags
    backward: Flags


def op_roles(context: Context) -> OpRoles:
    """Returns the roles of all operators."""
    trace, tree = context.trace, context.get(ops)
    table = trace.table("cpu_op")
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # a number that all inside one share
    linked = np.isin(outermost, unique_values(outermost[forward_backward(trace.tables).forward_rows]))
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in trace.strings], np.bool_)
    backward = (evaluates[table["name"]] if len(table) else linked) | (table["forward_thread"] > 0)
    return OpRoles(linked, in_subtrees(backward[tree.row], tree.nested.tree.stop)[tree.place])
