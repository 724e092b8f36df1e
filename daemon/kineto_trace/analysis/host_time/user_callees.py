"""What the lines of the training thread call that is no Python function: in C, as the samples tell.

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
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.analysis.host_time.user_lines import own_lines
from kineto_trace.arrays.row_groups import group, places_by_value
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.fwd_bwd import op_roles
from kineto_trace.structure.python.callees import CalleeSamples, callee_kind, callee_samples
from kineto_trace.structure.python.library_calls import CallKind
from kineto_trace.structure.python.python_samples import line_samples

NEARLY_ALL = 0.9  # of the operators of a name
LONGER = 2  # than the operators: what calling them takes
FEW = 4  # samples more than that are chance
TOLD = 0.1  # of a finding's time: callees with less are not named
MOST_TOLD = 3

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SliceCallees:
    """Callees of the slices of thread_slices, one value per slice, line and callee.

    name: place in `names`. kind: CallKind. share: of the slice's own samples.
    """

    names: list[str]
    place: Ints
    line: Ints
    name: Ints
    kind: Ints
    share: Floats


def slice_callees(context: Context) -> SliceCallees:
    """Returns the callees of the training thread."""
    told, slices, table = context.get(_samples), context.get(thread_slices), context.trace.table("python_function")
    place = np.full(len(table), NOTHING, np.int64)
    place[slices.row] = np.arange(len(slices))
    own = place[told.row] != NOTHING
    row, name = told.row[own], told.name[own]
    kinds = np.array([callee_kind(text) for text in told.names], np.int64)
    share = np.minimum(told.counts[own].sum(axis=1) / np.maximum(table["self_samples"][row], 1), 1.0)
    return SliceCallees(told.names, place[row], told.line[own], name, kinds[name] if len(name) else name, share)


def own_callees(context: Context) -> tuple[list[str], Ints]:
    """Returns the names of callees, and for each row of python_function the place of its callee among them.

    That is the one with most samples at the line of own_lines; NOTHING if more of these have none.
    """
    told, lines = context.get(_samples), context.get(own_lines)
    all_of_line = np.zeros(len(lines), np.int64)
    by_line = line_samples(context.trace)
    here = by_line.line == lines[by_line.row]
    np.add.at(all_of_line, by_line.row[here], by_line.counts[here].sum(axis=1))
    found = np.full(len(lines), NOTHING, np.int64)
    mine = np.flatnonzero(told.line == lines[told.row])
    counts = told.counts[mine].sum(axis=1)
    order = np.argsort(counts, kind="stable")
    mine, counts = mine[order], counts[order]
    without = all_of_line.copy()
    np.subtract.at(without, told.row[mine], counts)
    best = counts >= without[told.row[mine]]
    found[told.row[mine[best]]] = told.name[mine[best]]
    return told.names, found


def kind_weights(context: Context, rows: Ints, share: Floats) -> Floats:
    """Returns the weight of each CallKind by the callees of moments whose Python functions tell none.

    rows: places of moments. share: weight of each.
    """
    told, place = context.get(slice_callees), context.get(moments).place[rows]
    unknown = context.get(user_calls).kind[place] == CallKind.NONE
    by_slice = np.bincount(place[unknown], share[unknown], len(context.get(thread_slices)))
    weights: Floats = np.bincount(told.kind, by_slice[told.place] * told.share, len(CallKind)).astype(np.float64)
    return weights


def callees_text(context: Context, rows: Ints, share: Floats) -> str:
    """Formats what the user's functions called in most of these moments: "; 48 % in pickle.dumps (line 77)".

    rows: places of moments that are no training. share: of each, all together 1. "" if nothing has enough of them.
    """
    told, place = context.get(slice_callees), context.get(moments).place[rows]
    own = context.get(user_calls).user_slice[place] == place
    by_slice = np.bincount(place[own], share[own], len(context.get(thread_slices)))
    gone = context.get(trained_callees).callee[told.name]
    left = 1 - np.bincount(told.place, told.share * gone, len(by_slice))  # of each slice's samples
    weight = by_slice[told.place] * np.minimum(told.share / np.maximum(left[told.place], told.share), 1.0) * ~gone
    if not (weight > 0).any():
        return ""
    groups = group([told.name, told.line])
    weights = np.bincount(groups.number, weight)
    best = [place for place in np.argsort(-weights, kind="stable")[:MOST_TOLD].tolist() if weights[place] >= TOLD]
    named = [(weights[at], told.names[told.name[groups.first[at]]], told.line[groups.first[at]]) for at in best]
    return "".join(f"; {100 * part:.0f} % in {name} (line {line})" for part, name, line in named)


def _samples(context: Context) -> CalleeSamples:
    return callee_samples(context.trace)


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
