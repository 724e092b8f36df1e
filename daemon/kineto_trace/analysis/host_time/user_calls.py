"""The calls of the training thread as a tree of the user's functions and of what these call in libraries.

Theory of operation
    A node is a user's function below the node that called it, or the first library function that a user's function
    calls (an entry); what a library calls inside belongs to its entry, until it calls the user's code again: the
    DataLoader a data set, a module a user's forward(). So the tree is small however deep the stacks are. All slices of
    one depth are numbered at once.

    A slice also has the phase that the innermost function of torch around it began (none in the closure of an
    optimizer), and the kind of the outermost
    library function of a known kind below the innermost user's function, or a kind that holds for all below it.

    What runs below an import, up to the user's code, is importing: the modules of a compiler, of the DataLoader and of
    the optimizers neither compile nor begin a phase when they are imported. An import inside a compilation is a part
    of it, but one in the call of torch.compile is none: that call compiles nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.call_tree import CallTree, call_tree, levels
from kineto_trace.analysis.host_time.host_moments import NOTHING, thread_slices
from kineto_trace.analysis.host_time.step_functions import StepPhase, begun_phases
from kineto_trace.model.context import Context
from kineto_trace.structure.python.library_calls import CallKind, function_kinds

STICKY = (CallKind.COMPILE, CallKind.ANOMALY, CallKind.RESET)  # hold for everything below, also for user's code

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class UserCalls(CallTree):
    """The nodes, and of each slice of thread_slices:

    phase: innermost StepPhase. kind: CallKind. outer: the kind of the library that called the innermost user's
    function. loading: whether the slice is below the DataLoader. user_slice, phase_slice: place of the innermost slice
    at or above each slice that is of a user's function, or began a phase (a module's forward is one, inside another
    one, too).
    """

    phase: npt.NDArray[np.int8]
    kind: npt.NDArray[np.int8]
    outer: npt.NDArray[np.int8]
    loading: Flags
    user_slice: Ints
    phase_slice: Ints


def user_calls(context: Context) -> UserCalls:
    """Returns the tree of the training thread."""
    slices, kinds, begins = context.get(thread_slices), context.get(function_kinds), context.get(begun_phases)
    name = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    user, own_phase, own_kind = kinds.user[name], begins[name], kinds.call[name]
    count = len(slices)
    phase, kind, outer = (np.zeros(count + 1, np.int8) for _ in range(3))  # the last one is for "no caller"
    loading = np.zeros(count + 1, np.bool_)
    in_user, in_phase = (np.full(count + 1, NOTHING, np.int64) for _ in range(2))
    for at, above in levels(slices):
        in_user[at] = np.where(user[at], at, in_user[above])
        calling = np.where(kind[above] != CallKind.NONE, kind[above], outer[above])
        outer[at] = np.where(user[at], calling, outer[above])
        kind[at] = _kinds(own_kind[at], kind[above], user[at])
        begins_phase = ~np.isin(own_phase[at], (StepPhase.NONE, StepPhase.CLOSURE)) & (kind[at] != CallKind.IMPORT)
        in_phase[at] = np.where(begins_phase, at, in_phase[above])
        leaves = (own_phase[at] == StepPhase.CLOSURE) & (phase[above] == StepPhase.OPTIMIZER)
        phase[at] = np.select([begins_phase, leaves], [own_phase[at], StepPhase.NONE], phase[above])
        loading[at] = loading[above] | (begins_phase & (own_phase[at] == StepPhase.LOADING))
    tree = call_tree(slices, name, user, opens=user)
    return UserCalls(
        tree.name,
        tree.parent,
        tree.user,
        tree.node,
        phase[:-1],
        kind[:-1],
        outer[:-1],
        loading[:-1],
        in_user[:-1],
        in_phase[:-1],
    )


def _kinds(own: npt.NDArray[np.int8], above: npt.NDArray[np.int8], user: Flags) -> npt.NDArray[np.int8]:
    """The kind of each slice. own: of its function alone. above: of its caller's slice."""
    kept = np.where(user & ~np.isin(above, STICKY), CallKind.NONE, above)
    stronger = np.isin(own, STICKY) & ~np.isin(kept, (*STICKY, CallKind.IMPORT))
    stronger |= (own == CallKind.IMPORT) & (kept == CallKind.RESET)
    kinds: npt.NDArray[np.int8] = np.where((kept == CallKind.NONE) | stronger, own, kept)
    return kinds
