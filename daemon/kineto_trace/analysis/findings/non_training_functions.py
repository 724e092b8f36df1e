"""Functions that do not train, in programs that use a GPU: what the steps would gain without them.

Theory of operation
    Samples show which functions these are and what to do about them, as without a GPU (host_findings/user_code.py).
    Their cost is found by replaying the steps without them: without their time on the host, their work on the GPU and
    their waits for it. That is less than their time if the GPU lags behind anyway, and more if the host could run ahead
    without their waits.

    GPU idle time in the same functions is part of that cost, and not a finding of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.cause_views import CAUSES, time_causes
from kineto_trace.analysis.finding import COLLECTIVES_OF_THE_HOST, REMEDIES, Finding
from kineto_trace.analysis.findings.gpu_work_findings import models_without_backward, work_without_backward
from kineto_trace.analysis.host_findings.user_code import IN_COLLECTIVES, found_functions
from kineto_trace.analysis.host_time.host_moments import host_steps, moments
from kineto_trace.analysis.host_time.moment_classes import framework_calls
from kineto_trace.analysis.host_time.user_calls import below
from kineto_trace.analysis.idle_gaps import blocking_calls
from kineto_trace.analysis.step_replay import ReplayChange, StepReplay, function_slots, step_replay
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.base.array_types import Flags
from kineto_trace.base.quantities import format_duration
from kineto_trace.collectives.rank_matching import host_collectives
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, training_thread
from kineto_trace.structure.library_calls import CallKind

READS = REMEDIES[CallKind.ITEM]
ON_THE_HOST = 0.25  # of a function's time, beside copies from and to the GPU that such collectives need


class NonTrainingFunction(NamedTuple):
    """names: of its functions (numbers into Trace.strings). time: the time that disappears with it."""

    finding: Finding
    names: frozenset[int]
    time: Union


def non_training_findings(context: Context) -> Iterator[Finding]:
    """Yields functions of the program that do not train; models with an unknown share of the steps come from their
    kernels.
    """
    told = context.get(non_training)
    for finding, function in context.get(models_without_backward):
        if not any(function in each.names for each in told):
            yield finding
    yield from (each.finding for each in told)


def non_training(context: Context) -> tuple[NonTrainingFunction, ...]:
    """Returns the functions with a known share of the steps; empty if the steps cannot be replayed."""
    replay, tree = context.get(step_replay), context.get(framework_calls)
    if replay is None:
        return ()
    told: list[NonTrainingFunction] = []
    for finding, function in context.get(models_without_backward):
        told += _aside(context, replay, finding, tree.name == function, of_model=True)
    for finding, roots in context.get(found_functions):
        nodes = np.isin(np.arange(len(tree)), roots)
        if roots and not any(set(tree.name[nodes].tolist()) & each.names for each in told):
            told += _aside(context, replay, finding, nodes)
    return tuple(told)


def non_training_time(context: Context) -> Union:
    """Returns the time of all of them together."""
    parts = [each.time for each in context.get(non_training)]
    nothing = np.empty(0, np.int64)
    return union(
        np.concatenate([nothing, *(part.start for part in parts)]),
        np.concatenate([nothing, *(part.end for part in parts)]),
    )


def is_part_of_one(context: Context, finding: Finding) -> bool:
    """Returns whether a finding of idle time is part of one of these functions."""
    if finding.frame < 0:
        return False
    name = int(context.trace.table("python_function")["name"][finding.frame])
    return any(name in each.names and finding.saving_ns <= each.finding.saving_ns for each in context.get(non_training))


def _aside(
    context: Context, replay: StepReplay, finding: Finding, begins: Flags, *, of_model: bool = False
) -> Iterator[NonTrainingFunction]:
    """Yields the functions of a finding that can be left out of the replay.

    begins: the nodes of framework_calls at which the function begins.
    of_model: whether it was recognised by its kernels.
    """
    tree, told = context.get(framework_calls), context.get(moments)
    nodes = below(tree, begins)
    slots = context.get(function_slots).of(nodes)
    length = int(slots.within(np.array([replay.low]), np.array([replay.high]))[0])
    if not length:
        return
    # a sample represents its share of the time; slots may overestimate it
    sampled = float(told.weight[nodes[tree.node[told.place]]].sum()) / context.get(host_steps).total_ns
    surplus = max(length / (replay.high - replay.low) / max(sampled, 1e-9), 1.0)
    share = replay.share(ReplayChange(left_out=slots, thread=context.get(training_thread))) / surplus
    window = context.get(time_causes).steps.measured_ns
    evidence = (
        f"the steps, run again without it, take {100 * share:.3g} % less time; the training thread is in it for "
        f"{format_duration(sampled * window)}; "
        f"{work_without_backward(context, slots) if of_model else finding.evidence}"
    )
    title, advice = finding.title, finding.advice
    if finding.name == IN_COLLECTIVES and _collectives_of_the_host(context, slots) >= ON_THE_HOST * length:
        title, advice = f"{title} of the host", f"{COLLECTIVES_OF_THE_HOST} {advice}"
    if READS not in advice and _waits(context, slots) >= context.get(time_causes).steps.steps > 0:
        advice = f"{advice} It also waits for results of the GPU. {READS}"
    replayed = replace(
        finding,
        title=title,
        saving_ns=int(share * window),
        evidence=evidence,
        advice=advice,
        causes=CAUSES,
        replayed=True,
    )
    yield NonTrainingFunction(replayed, frozenset(tree.name[nodes].tolist()), slots)


def _collectives_of_the_host(context: Context, time: Union) -> int:
    """Returns how long (ns) collectives of gloo or MPI run in this time."""
    found = host_collectives(context)
    running = union(found.start, found.end)
    return int(time.within(running.start, running.end).sum())


def _waits(context: Context, time: Union) -> int:
    """Counts the calls of the training thread in this time that wait for the GPU."""
    called = context.get(calls)
    own = context.get(blocking_calls) & (called.thread == context.get(training_thread))
    return int(np.count_nonzero(time.within(called.start[own], called.start[own] + 1)))
