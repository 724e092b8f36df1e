"""HTA's steps in the view profiler_steps."""

from kineto_trace.analysis.overview.step_views import NO_STEPS, profiler_steps, step_values
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.compat.hta.hta_frame import hta_frame, step_numbers
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat


@profiler_steps.variant(Compat.HTA)
def hta_steps(context: Context) -> Answer:
    """compat=hta: the steps of get_profiler_steps.

    These are the numbers of the steps that remain after HTA has dropped the last one (if there are at least two), each
    once and in ascending order. Where a step appears twice, its first row counts.
    """
    values = step_values(context)
    left = unique_values(step_numbers(context.trace.strings, context.get(hta_frame).name))
    first = {number: row for row, number in reversed(list(enumerate(values["step"].tolist())))}
    rows = [first[number] for number in left[left >= 0].tolist() if number in first]
    return Answer({name: column[rows] for name, column in values.items()}, () if rows else (NO_STEPS,))
