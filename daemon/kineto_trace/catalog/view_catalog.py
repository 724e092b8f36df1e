"""All views: importing this module registers them."""

from kineto_trace.analysis.causes import cause_views, rank_cause_views  # noqa: F401
from kineto_trace.analysis.counters import (  # noqa: F401
    clock_views,
    hardware_counter_views,
    link_views,
    roofline_views,
    step_counter_views,
)
from kineto_trace.analysis.critical_path import critical_path_views  # noqa: F401
from kineto_trace.analysis.diff import diff_views, event_diff_views  # noqa: F401
from kineto_trace.analysis.distributed import (  # noqa: F401
    collective_views,
    distributed_views,
    rank_step_views,
    rank_views,
    straggler_views,
    what_if_views,
)
from kineto_trace.analysis.events import event_filter_views  # noqa: F401
from kineto_trace.analysis.findings import finding_views, recommendation_views  # noqa: F401
from kineto_trace.analysis.flame import flame_views  # noqa: F401
from kineto_trace.analysis.gpu_time import (  # noqa: F401
    annotation_views,
    bandwidth_views,
    kernel_breakdown_views,
    latency_views,
    temporal_views,
)
from kineto_trace.analysis.host_time import (  # noqa: F401
    module_views,
    operator_views,
    python_views,
    setting_views,
    step_phase_views,
    thread_views,
)
from kineto_trace.analysis.idle import idle_cause_views, idle_views  # noqa: F401
from kineto_trace.analysis.kernels import (  # noqa: F401
    counter_views,
    graph_views,
    hlo_views,
    kernel_sequence_views,
    kernel_views,
    precision_views,
)
from kineto_trace.analysis.launches import launch_views, op_delay_views, queue_views  # noqa: F401
from kineto_trace.analysis.memory import (  # noqa: F401
    memory_holder_views,
    memory_snapshot_views,
    memory_views,
    tensor_views,
)
from kineto_trace.analysis.overview import (  # noqa: F401
    counter_series_views,
    flop_views,
    not_recorded_views,
    overview_views,
    recording_views,
    step_views,
    validation_views,
)
from kineto_trace.compat.views import (  # noqa: F401
    hta_annotation_views,
    hta_critical_path_views,
    hta_event_views,
    hta_gpu_time_views,
    hta_idle_views,
    hta_launch_views,
    hta_queue_views,
    hta_step_views,
    hta_straggler_views,
    plugin_diff_views,
    plugin_distributed_views,
    plugin_kernel_views,
    plugin_memory_views,
    plugin_module_views,
    plugin_operator_views,
    plugin_overview_views,
    plugin_recommendation_views,
)
from kineto_trace.errors import ViewError
from kineto_trace.view_api.view import VIEWS, View

__all__ = ["VIEWS", "find_view"]


def find_view(name: str) -> View:
    """Returns the view with this name. Raises ViewError if there is none."""
    found = VIEWS.get(name)
    if found is None:
        raise ViewError(f"no view is called {name!r}; available: {', '.join(sorted(VIEWS))}")
    return found
