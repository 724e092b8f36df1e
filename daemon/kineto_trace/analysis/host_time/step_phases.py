"""When the training thread loads, computes forward and backward, and updates the parameters, by exact events.

Theory of operation
    Loading and the optimizer are annotations that torch makes. The backward is the time of the operators that
    autograd's engine runs, on any thread, since the training thread waits for them; the forward that of the outermost
    operators that have a backward. Short gaps in a phase (up to LONG_GAP_NS) are what calling the operators takes and
    belong to it, unless another phase begins there. Where two phases overlap, the first one in the order of STEP_PHASES
    counts: an optimizer may be called with a closure that runs forward and backward. What is left is "other", so the
    parts of a step sum to its length.
"""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.host_moments import host_steps
from kineto_trace.analysis.host_time.moment_classes import LONG_GAP_NS, OPTIMIZER, annotated
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.kernel_traits.kernel_types import data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.fwd_bwd import op_roles

STEP_PHASES = ("loading", "forward", "backward", "optimizer")
OTHER = "other"

Ints = npt.NDArray[np.int64]


def step_phases(context: Context) -> Ints:
    """Returns the time (ns) of each of STEP_PHASES, and of OTHER, in each step of host_steps: [phase, step]."""
    window = context.get(host_steps)
    taken, shares = union(np.empty(0, np.int64), np.empty(0, np.int64)), []
    for phase in phase_times(context):
        shares.append(difference(phase, taken).within(window.start, window.end))
        taken = union(np.concatenate([taken.start, phase.start]), np.concatenate([taken.end, phase.end]))
    shares.append(window.end - window.start - taken.within(window.start, window.end))
    return np.stack(shares)


def phase_times(context: Context) -> tuple[Union, Union, Union, Union]:
    """Returns when each of STEP_PHASES runs on the host; they may overlap, and the first one counts then."""
    thread, table, roles = context.get(host_steps).thread, context.trace.table("cpu_op"), context.get(op_roles)
    outermost = context.get(ops).nested.tree.parent[context.get(ops).place] < 0
    start, end = table["start"], table.end()
    backward = roles.backward & outermost
    forward = roles.linked & outermost & (table["thread"] == thread) & ~backward
    loading = annotated(context, context.get(data_loading_names))
    optimizer = annotated(context, matches(context.trace.strings, OPTIMIZER))
    ahead, back = (union(start[chosen], end[chosen]) for chosen in (forward, backward))
    borders = [loading.start, optimizer.start]
    return (
        loading,
        _closed(ahead, np.concatenate([*borders, back.start])),
        _closed(back, np.concatenate([*borders, ahead.start])),
        optimizer,
    )


def _closed(found: Union, borders: Ints) -> Union:
    """The union with its short gaps in which no border lies."""
    if not len(found.start):
        return found
    low, high = found.end[:-1], found.start[1:]
    borders = np.sort(borders)
    crossed = np.searchsorted(borders, high, side="left") > np.searchsorted(borders, low, side="left")
    apart = (high - low > LONG_GAP_NS) | crossed
    return Union(found.start[np.append(True, apart)], found.end[np.append(apart, True)])
