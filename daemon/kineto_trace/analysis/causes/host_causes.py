"""What the steps' time of a program without GPU activity went to: the parts of the host's steps, which sum to them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.host_time.host_moments import host_steps, moments
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.step_phases import OTHER, STEP_PHASES, step_phases
from kineto_trace.analysis.host_time.user_lines import commonest_place
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu

HOST_TITLES: Mapping[str, str] = {
    "host_loading": "the host waits for the next batch, or makes it",
    "host_forward": "the host computes forward: operators that have a backward",
    "host_backward": "the host computes backward: operators that autograd runs",
    "host_optimizer": "the host is in the optimizer's step and zero_grad",
    "host_other": "the host runs the program's own code, or waits in it: all else",
}
HOST_CAUSES = tuple(HOST_TITLES)
_CLASS = {  # of the moments of each cause
    "host_loading": Class.LOADING,
    "host_forward": Class.FORWARD,
    "host_backward": Class.BACKWARD,
    "host_optimizer": Class.OPTIMIZER,
    "host_other": Class.OTHER,
}
_PHASES = (*STEP_PHASES, OTHER)
assert tuple(f"host_{phase}" for phase in _PHASES) == HOST_CAUSES


class HostCause(NamedTuple):
    """total_ns: over all steps. what: function and line of the program that has most samples of it; None: unknown."""

    cause: str
    total_ns: int
    what: str | None


class HostCauses(NamedTuple):
    """causes: those that take time, most first; empty: the trace has GPU activity, or tells nothing of the host.

    steps: how many were recorded as a whole; 0: the trace has none, and all of it counts.
    """

    causes: tuple[HostCause, ...]
    steps: int


def host_causes(context: Context) -> HostCauses:
    """Returns the causes of a trace without GPU activity."""
    if len(context.get(gpu)):
        return HostCauses((), 0)
    window, found = context.get(host_steps), context.get(moments)
    if not window.total_ns or not (len(context.trace.table("cpu_op")) or len(found)):
        return HostCauses((), 0)
    kind = context.get(moment_classes).kind
    causes = []
    for cause, total in zip(HOST_CAUSES, context.get(step_phases).sum(axis=1).tolist(), strict=True):
        rows = np.flatnonzero(kind == _CLASS[cause])
        place = commonest_place(context, rows, found.weight[rows]) if len(rows) else None
        causes.append(HostCause(cause, total, str(place) if place is not None else None))
    ordered = sorted((cause for cause in causes if cause.total_ns), key=lambda cause: -cause.total_ns)
    return HostCauses(tuple(ordered), len(window.start) if window.told else 0)
