"""HTA's critical path in the views critical_path and critical_path_breakdown."""

from collections.abc import Callable, Sequence

from kineto_trace.analysis.critical_path.critical_path_views import (
    STEP,
    critical_path_breakdown,
    critical_path_edges,
    patterns_of,
)
from kineto_trace.compat.hta import hta_critical_path
from kineto_trace.compat.hta.hta_frame import HtaError
from kineto_trace.model.context import Context
from kineto_trace.structure.annotation_window import Instance
from kineto_trace.structure.dependency_graph import DATA_LOADING
from kineto_trace.view_api.view import Answer, Compat, View

Hta = Callable[[Context, str, Instance, Sequence[str]], Answer]


@critical_path_edges.variant(Compat.HTA)
def hta_edges(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """compat=hta: the graph and the longest path of HTA's critical_path_analysis (version 0.6.1).

    Times are rounded to whole microseconds. The time between outermost operators and inside synchronising calls has
    no weight, launch delays count only where the queue was empty, and kernel-kernel delays only below 1500 us. As in
    HTA, `instance` defaults to the first one, and `data_loading` has no effect unless it is given. Where HTA fails on
    a trace, a note says so and the path is the exact one.
    """
    return _or_exact(hta_critical_path.edges, critical_path_edges, context, (annotation, instance, data_loading, infer))


@critical_path_breakdown.variant(Compat.HTA)
def hta_breakdown(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """compat=hta: the figures of CPGraph.summary().

    Copies and fills count as gpu_compute_bound, and edges without a weight (dependency, sync_dependency) are left out.
    """
    options = (annotation, instance, data_loading, infer)
    return _or_exact(hta_critical_path.breakdown, critical_path_breakdown, context, options)


def _or_exact(hta: Hta, view: View, context: Context, options: tuple[str, Instance, Sequence[str], bool]) -> Answer:
    """HTA's figures, or where HTA fails the exact ones of the instance that HTA means."""
    annotation, instance, data_loading, infer = options
    given = patterns_of(data_loading)
    try:
        return hta(context, annotation, instance, () if given == DATA_LOADING else given)
    except HtaError as exc:
        first = 0 if annotation and instance is None else instance
        exact = view.function(context, annotation=annotation, instance=first, data_loading=given, infer=infer)
        return Answer(exact.values, [exc.note, *exact.notes])
