"""Functions of the user that native code calls back, and the time that its callers spend around them.

Theory of operation
    A compiled program calls the host back (jax.pure_callback): it copies values to the host, makes arrays of them,
    calls the function, and copies its result. Samples see some of that in the function, and the rest in the line that
    waits for the program, in native code. Without the callback both go, so they are one finding.

    The caller's time counts for the function if

    - frames of a library lie between both, called at the line of the caller that has its time;
    - the caller's samples at that line are in one callee that is no Python function;
    - most of its time lies in gaps of the same kind, told by the GPU's activities before and after, as gaps that the
      function has most of. Only what lies in these counts.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import Detail
from kineto_trace.analysis.idle.idle_gaps import idle_gaps
from kineto_trace.analysis.idle.idle_pieces import IDLE_CAUSES, idle_pieces
from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, gpu
from kineto_trace.structure.python.callees import callee_samples
from kineto_trace.structure.python.python_frames import python_frames
from kineto_trace.structure.python.python_samples import line_samples

LEAST_GAPS = 3
MOST = 0.5  # of a kind's time in Python is the function's; of the caller's time lies in such kinds
NATIVE = 0.9  # of the caller's samples at the line are in one callee
LEAST_SAMPLES = 3

Ints = npt.NDArray[np.int64]


class CalledBack(NamedTuple):
    """function, caller: parts of the cause "python". share: of the caller's time that goes with the function."""

    function: Detail
    caller: Detail
    share: float


def round_trips(context: Context, parts: list[Detail]) -> list[CalledBack]:
    """Returns those among these parts of the cause "python"; a function or a caller is in one at most."""
    found: list[CalledBack] = []
    taken: set[Detail] = set()
    for function in parts:
        for caller in parts:
            if caller is function or {caller, function} & taken or not _calls_back(context, caller, function):
                continue
            share = _share_in_gaps(context, caller, function)
            if share >= MOST:
                taken |= {caller, function}
                found.append(CalledBack(function, caller, share))
    return found


def _calls_back(context: Context, caller: Detail, function: Detail) -> bool:
    """Tells whether the caller's line is in native code, and a library's frames below it call the function."""
    frames, table = context.get(python_frames), context.trace.table("python_function")
    if not frames.samples or min(caller.frame, function.frame) < 0 or caller.device != function.device:
        return False
    place = int(np.flatnonzero(frames.row == function.frame)[0])
    below, at, parent = place, int(frames.nested.tree.parent[place]), frames.nested.tree.parent
    while at >= 0 and frames.user[at] != at:
        below, at = at, int(parent[at])
    if at < 0 or below == place or frames.name[at] != caller.name:
        return False
    return table["call_line"][frames.row[below]] == caller.line and _is_native(context, caller)


def _is_native(context: Context, caller: Detail) -> bool:
    """Tells whether the caller's own samples at its line are in one callee, which then is no Python function."""
    names = context.trace.table("python_function")["name"]
    lines, callees = line_samples(context.trace), callee_samples(context.trace)
    own = (names[lines.row] == caller.name) & (lines.line == caller.line)
    inner = (names[callees.row] == caller.name) & (callees.line == caller.line)
    seen = int(lines.counts[own].sum())
    most = np.bincount(callees.name[inner], callees.counts[inner].sum(axis=1)).max(initial=0)
    return bool(seen >= LEAST_SAMPLES and most >= NATIVE * seen)


def _share_in_gaps(context: Context, caller: Detail, function: Detail) -> float:
    """The share of the caller's time that lies in gaps of kinds of which the function has most."""
    gaps, pieces, activity = context.get(idle_gaps), context.get(idle_pieces), context.get(gpu)
    named = np.append(activity.name.astype(np.int64), NOTHING)
    python = np.flatnonzero((pieces.cause == IDLE_CAUSES.index("python")) & (pieces.name >= 0))
    gap, name, length = pieces.gap[python], pieces.name[python], pieces.length[python]
    kinds = group([gaps.device[gap], named[gaps.before[gap]], named[gaps.after[gap]]])
    of_function, of_caller = name == function.name, name == caller.name
    held = kinds.sums(length * of_function)
    pairs = group([kinds.number[of_function], gap[of_function]])
    often = np.bincount(kinds.number[of_function][pairs.first], minlength=len(kinds)) >= LEAST_GAPS
    told = often & (held >= MOST * kinds.sums(length))
    times: Ints = kinds.sums(length * of_caller)
    return float(times[told].sum() / max(int(times.sum()), 1))
