"""Functions that train nothing, in programs that use a GPU: what the steps would gain without them.

Theory of operation
    Which functions these are, and what is to be done about them, is told by their samples, as without a GPU
    (host_findings/user_code.py). What they take is told by running the steps again without them: without their time on
    the host, their work on the GPU and their waits for it. That is less than their time if the GPU is behind anyway,
    and more if the host could run ahead without their waits.

    What the GPU's idle time tells of the same functions is a part of that, and no finding of its own.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.time_causes import CAUSES, time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.user_code import FoundFunction, found_functions
from kineto_trace.analysis.host_time.framework_calls import framework_calls
from kineto_trace.analysis.host_time.host_moments import NOTHING, host_steps, moments
from kineto_trace.analysis.replay.function_slots import function_slots
from kineto_trace.analysis.replay.step_replay import Change, StepReplay, step_replay
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.base.quantities import ms
from kineto_trace.model.context import Context

Flags = npt.NDArray[np.bool_]


class AsideFunction(NamedTuple):
    """names: of the functions in it (numbers into Trace.strings). time: that goes with it."""

    finding: Finding
    names: frozenset[int]
    time: Union


def aside_functions(context: Context) -> tuple[AsideFunction, ...]:
    """Returns those whose part of the steps is known; none where the steps cannot be run again."""
    replay = context.get(step_replay)
    if replay is None:
        return ()
    told = (_aside(context, replay, found) for found in context.get(found_functions) if found.roots)
    return tuple(each for each in told if each is not None)


def aside_time(context: Context) -> Union:
    """Returns the time of all of them together."""
    parts = [each.time for each in context.get(aside_functions)]
    nothing = np.empty(0, np.int64)
    return union(
        np.concatenate([nothing, *(part.start for part in parts)]),
        np.concatenate([nothing, *(part.end for part in parts)]),
    )


def covered(context: Context, finding: Finding) -> bool:
    """Tells whether a finding of idle time is a part of one of these functions."""
    if finding.frame < 0:
        return False
    name = int(context.trace.table("python_function")["name"][finding.frame])
    return any(
        name in each.names and finding.saving_ns <= each.finding.saving_ns for each in context.get(aside_functions)
    )


def _aside(context: Context, replay: StepReplay, found: FoundFunction) -> AsideFunction | None:
    tree, told = context.get(framework_calls), context.get(moments)
    nodes = np.zeros(len(tree), np.bool_)
    nodes[list(found.roots)] = True
    for place in range(len(tree)):  # outer ones have smaller numbers
        nodes[place] |= tree.parent[place] != NOTHING and nodes[tree.parent[place]]
    slots = context.get(function_slots).of(nodes)
    length = int(slots.within(np.array([replay.low]), np.array([replay.high]))[0])
    if not length:
        return None
    # a sample stands for its share of the time; slots can be too many
    sampled = float(told.weight[nodes[tree.node[told.place]]].sum()) / context.get(host_steps).total_ns
    surplus = max(length / (replay.high - replay.low) / max(sampled, 1e-9), 1.0)
    share = replay.share(Change(left_out=slots)) / surplus
    window = context.get(time_causes).steps.measured_ns
    taken = found.finding.evidence.split(";")[0]
    evidence = (
        f"the steps, run again without it, take {100 * share:.3g} % less time; the training thread is in it for "
        f"{ms(sampled * window)}, of that without the training's operators {taken}"
    )
    finding = replace(found.finding, saving_ns=int(share * window), evidence=evidence, causes=CAUSES, replayed=True)
    return AsideFunction(finding, frozenset(tree.name[nodes].tolist()), slots)
