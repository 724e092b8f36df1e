"""Functions of the program that compute in many small operators what few large ones could: loops over rows or numbers.

Theory of operation
    Operators that modules call do not count: a model of many layers is no loop. On the CPU an operator below a few tens
    of us is mostly the cost of calling it. Each forward operator also has a backward, whose time counts with it. What a
    function of the program runs inside the backward, for an autograd.Function or a hook, counts the same way. With a
    GPU the cost shows as idle time, which other findings explain.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.direct_operators import (
    backward_ns,
    called_directly,
    called_in_backward,
    moments_of,
)
from kineto_trace.analysis.host_findings.host_figures import is_enough, margin, per_step, processor_share
from kineto_trace.analysis.host_time.host_moments import host_steps
from kineto_trace.analysis.host_time.moment_classes import moment_classes
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.python.code_places import code_place

MANY = 200  # outermost operators of one function in a step
SMALL_NS = 50_000  # of the function's time for each of them
REMAINS = 0.2  # of the time, in the large operators that take their place

Ints = npt.NDArray[np.int64]


def small_operators(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function whose forward, or whose own part of the backward, is a loop of such."""
    if len(context.get(gpu)) or not len(context.get(user_calls)):
        return
    for rows, caller, in_backward in ((*called_directly(context), False), (*called_in_backward(context), True)):
        yield from _loops(context, rows, caller, in_backward)


def _loops(context: Context, rows: Ints, caller: Ints, in_backward: bool) -> Iterator[Finding]:
    """rows: operators. caller: the name of the function that called each."""
    if not len(rows):
        return
    functions, place, counts = np.unique(caller, return_inverse=True, return_counts=True)
    steps = max(len(context.get(host_steps).start), 1)
    none = np.zeros(len(functions))
    backward = none if in_backward else backward_ns(context, rows, place.reshape(-1), len(functions))
    for number in np.flatnonzero(counts >= MANY * steps).tolist():
        mine = moments_of(context, int(functions[number]), in_backward)
        weight = float(context.get(moment_classes).weight[mine].sum())
        each = weight / counts[number] * processor_share(context)  # without the wait for a processor
        if each > SMALL_NS or not is_enough(context, weight, len(mine)):
            continue
        whole = weight + float(backward[number])
        where = code_place(context.trace.strings[int(functions[number])])
        more = "" if in_backward else f", and {per_step(context, float(backward[number]))} in their backward"
        yield Finding(
            name="small_operators",
            title=f"{where.short} computes in {counts[number] / steps:,.0f} small operators a step"
            + (", inside the backward" if in_backward else ""),
            saving_ns=int(whole * (1 - REMAINS)),
            advice=remedies.SMALL_OPERATORS,
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}, {each / 1e3:.0f} us of a processor "
            f"for each operator{more}; the saving assumes that {100 * REMAINS:.0f} % of it remains",
            where=str(where),
        )
