"""Figures that several rules about the host use: shares of the steps, and how sure they are."""

import math

from kineto_trace.analysis.host_time.host_moments import host_steps, moments
from kineto_trace.base.quantities import ms
from kineto_trace.model.context import Context
from kineto_trace.structure.python.thread_use import thread_use, window_ns

LEAST = 0.02  # of the steps' time: what is less is within the noise of samples
LEAST_MOMENTS = 3


def total_ns(context: Context) -> int:
    """Returns the time of all steps, of which findings take a part; at least 1."""
    return context.get(_total_ns)


def _total_ns(context: Context) -> int:
    return max(context.get(host_steps).total_ns, 1)


def per_step(context: Context, weight: float) -> str:
    """Formats a time as one per step: "12.3 ms of each step (31 %)"."""
    window, total = context.get(host_steps), total_ns(context)
    share = f"{100 * weight / total:.0f} %"
    if not window.told:
        return f"{ms(weight)} ({share} of the trace)"
    return f"{ms(weight / len(window.start))} of each step ({share})"


def margin(context: Context, weight: float) -> str:
    """Formats how sure a share is: "±3 points" if it comes from samples."""
    if is_exact(context):
        return "by exact calls"
    count = max(len(context.get(moments)), 1)
    share = min(max(weight / total_ns(context), 0.0), 1.0)
    return f"±{196 * math.sqrt(share * (1 - share) / count):.0f} points"


def is_exact(context: Context) -> bool:
    """Tells whether all calls of Python were recorded, in the place of samples."""
    return not context.trace.table("python_function")["self_samples"].any()


def idleness(context: Context, share: float) -> str:
    """Formats in how much of a time the thread did not run; "" if calls, which do not know that, were recorded."""
    return "" if is_exact(context) else f"; the thread slept or waited in {100 * share:.0f} % of it"


def is_enough(context: Context, weight: float, count: int) -> bool:
    """Tells whether so much time, in so many moments, is worth a finding."""
    return weight >= LEAST * total_ns(context) and count >= LEAST_MOMENTS


def processor_share(context: Context) -> float:
    """Returns in how much of the time in which the training thread was ready to run it had a processor; 1: unknown."""
    use = next((use for use in thread_use(context.trace.target) if use.thread == context.get(host_steps).thread), None)
    if use is None or not use.running or not use.samples:
        return 1.0
    return min(use.cpu_ns / window_ns(context.trace) / (use.running / use.samples), 1.0)
