"""All views: importing this module registers them."""

from kineto_trace.analysis.view import VIEWS, View
from kineto_trace.analysis.views import (  # noqa: F401
    annotations,
    bandwidth,
    collectives,
    counters,
    critical_path,
    diff,
    diff_events,
    distributed,
    findings,
    frequent,
    idle,
    idle_causes,
    kernel_breakdown,
    kernels,
    launches,
    memory,
    modules,
    op_delay,
    operators,
    overview,
    python,
    queue,
    ranks,
    recommendations,
    steps,
    stragglers,
    temporal,
    tensors,
    validate,
)
from kineto_trace.errors import ViewError

__all__ = ["VIEWS", "find_view"]


def find_view(name: str) -> View:
    """The view of this name. Raises ViewError."""
    found = VIEWS.get(name)
    if found is None:
        raise ViewError(f"no view {name!r}; there are: {', '.join(sorted(VIEWS))}")
    return found
