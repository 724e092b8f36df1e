"""The line of the program's own code at each moment: of the innermost function of the user."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.host_moments import NOTHING, moments, thread_slices
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import CodePlace, code_place
from kineto_trace.structure.python.python_samples import line_samples

FEW = 3  # samples of a call: so few agree on its line, or nearly

Ints = npt.NDArray[np.int64]


def own_lines(context: Context) -> Ints:
    """Returns for each row of python_function the line with most of its own samples; 0: unknown."""
    told = line_samples(context.trace)
    known = told.line > 0
    lines = context.trace.table("python_function")["line"].astype(np.int64)
    order = np.argsort(told.counts.sum(axis=1), kind="stable")
    order = order[known[order]]
    lines[told.row[order]] = told.line[order]
    return lines


def user_lines(context: Context) -> Ints:
    """Returns for each moment the line in its innermost function of the user; 0: unknown.

    A slice states the line at which it was called. Where a trace does not record that, a slice that calls others knows
    the line of most of its samples: this holds for all if they are few, or if all of them belong to one child.
    """
    found, calls, slices = context.get(moments), context.get(user_calls), context.get(thread_slices)
    if not len(calls):
        return np.zeros(len(found), np.int64)
    table = context.trace.table("python_function")
    inner = calls.user_slice[found.place]
    row = slices.row[inner]
    samples = table["samples"][slices.row].astype(np.int64)
    entry = _child_toward(found.place, inner, slices.parent)
    sure = (samples[inner] <= FEW) | (2 * samples[entry] > samples[inner])
    told = table["call_line"][slices.row[entry]]
    called = np.where(told > 0, told, np.where(sure, table["line"][row], 0))
    lines: Ints = np.where(inner == found.place, context.get(own_lines)[row], called)
    return np.where(inner == NOTHING, 0, lines)


def commonest_place(context: Context, rows: Ints, weight: npt.NDArray[np.float64]) -> CodePlace | None:
    """Returns the user's function, with its line, that has most weight of these moments; None if none is known.

    rows: places of moments. weight: of each of them. Moments whose line is unknown count only if no line is known.
    """
    calls, slices = context.get(user_calls), context.get(thread_slices)
    inner, lines = calls.user_slice[context.get(moments).place[rows]], context.get(user_lines)[rows]
    known = (inner != NOTHING) & (weight > 0)
    if (known & (lines > 0)).any():
        known &= lines > 0
    if not known.any():
        return None
    names = context.trace.table("python_function")["name"][slices.row[inner[known]]].astype(np.int64)
    groups = group([names, lines[known]])
    best = int(groups.first[int(np.argmax(groups.sums(weight[known])))])
    return code_place(context.trace.strings[int(names[best])], int(lines[known][best]))


def _child_toward(place: Ints, inner: Ints, parent: Ints) -> Ints:
    """The slice directly below `inner` on the way to `place`; `place` itself where they are the same."""
    at = place.copy()
    while True:
        up = (at != inner) & (inner != NOTHING) & (parent[at] != inner)
        if not up.any():
            return at
        at[up] = parent[at[up]]
