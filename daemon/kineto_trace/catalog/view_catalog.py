"""All views: importing this module registers them."""

from difflib import get_close_matches

from kineto_trace.analysis import (  # noqa: F401
    annotation_views,
    cause_views,
    critical_path_views,
    event_filter_views,
    flame_views,
    gpu_time_views,
    idle_views,
    launch_views,
    memory_views,
    tensor_views,
)
from kineto_trace.analysis.counters import (  # noqa: F401
    hardware_counter_views,
    roofline,
)
from kineto_trace.analysis.diff import diff_views, event_diff_views  # noqa: F401
from kineto_trace.analysis.distributed import (  # noqa: F401
    collective_views,
    distributed_views,
    rank_views,
    what_if_views,
)
from kineto_trace.analysis.findings import finding_views, recommendation_views  # noqa: F401
from kineto_trace.analysis.host_time import (  # noqa: F401
    operator_views,
    step_phase_views,
    thread_views,
)
from kineto_trace.analysis.kernels import (  # noqa: F401
    graph_views,
    kernel_views,
    precision_views,
)
from kineto_trace.analysis.overview import (  # noqa: F401
    counter_series_views,
    flop_views,
    not_recorded_views,
    overview_views,
    step_breakdown,
)
from kineto_trace.compat import (  # noqa: F401
    hta_critical_path,
    hta_event_views,
    hta_gpu_time_views,
    plugin_diff_tree,
    plugin_distributed_views,
    plugin_kernels,
    plugin_memory,
    plugin_modules,
)
from kineto_trace.errors import ViewError
from kineto_trace.view_api.view import VIEWS, View

__all__ = ["VIEWS", "find_view"]


def find_view(name: str) -> View:
    """Returns the view with this name. Raises ViewError if there is none."""
    found = VIEWS.get(name)
    if found is None:
        like = get_close_matches(name, VIEWS, 3)
        others = f"did you mean {' or '.join(like)}?" if like else "kinetoctl report --list shows all views"
        raise ViewError(f"no view is called {name!r:.80}; {others}")
    return found
