"""What GPUs did is unknown, not zero, where the trace has no GPU activity."""

import pytest
from kineto_trace import views
from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result
from support.trace_files.ranks import Event, context, event, launched, step

BOUND_BY_GPU = {
    "gpu_compute_bound",
    "gpu_memory_bound",
    "gpu_communication_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
}
STEPS = [
    line
    for number in (1, 2, 3)
    for line in (
        step(number, 1000 * number, 900),
        event("cpu_op", "aten::mm", 1000 * number + 10, 300),
        event("user_annotation", "gloo:all_reduce", 1000 * number + 400, 400),
    )
]


def shown(view: str, *ranks: list[Event]) -> Result:
    contexts: list[Context] = [context(events, rank=rank) for rank, events in enumerate(ranks)]
    found = views()[view]
    return found.combine([(rank, found.partial(each)) for rank, each in enumerate(contexts)])


@pytest.mark.parametrize(
    ("view", "unknown"),
    [
        ("step_breakdown", {"kernel_us", "memcpy_us", "memset_us", "kernel_pct", "memcpy_pct", "memset_pct"}),
        ("overview", {"gpus", "kernels", "kernel_us", "kernel_pct", "memcpy_pct", "memset_pct"}),
        ("profiler_steps", {"gpu_activities", "gpu_us"}),
        ("launch_summary", {"launches", "short_activities", "long_calls", "long_delays", "cpu_us", "gpu_us"}),
    ],
)
def test_without_gpu_activity_the_figures_of_gpus_are_missing(view: str, unknown: set[str]) -> None:
    result = shown(view, STEPS)
    assert {name: set(result.values(name)) for name in unknown} == {name: {None} for name in unknown}
    assert NO_GPU in result.notes


def test_with_gpu_activity_nothing_is_missing() -> None:
    result = shown("step_breakdown", [*STEPS, *launched("k", 1020, 1030, 50, 1)])
    assert result.values("kernel_us")[:3] == [50, 0, 0]
    assert NO_GPU not in result.notes


def test_without_gpu_activity_nothing_is_told_to_be_bound_by_a_gpu() -> None:
    result = shown("critical_path_breakdown", STEPS)
    unknown = {row["bound_by"] for row in result.rows() if row["time_us"] is None and row["edges"] is None}
    assert unknown == BOUND_BY_GPU
    assert NO_GPU in result.notes


def test_the_computation_of_ranks_without_gpu_activity_is_missing() -> None:
    result = shown("distributed_overlap", STEPS, [*STEPS, *launched("k", 1020, 1030, 50, 1)])
    first = result.rows()[2:4]
    assert [(row["step"], row["computation_us"], row["overlapping_us"]) for row in first] == [
        ("1", None, None),
        ("1", 50, 0),
    ]
    assert result.notes == (
        "rank 0 has no GPU activity: communication is measured on the host, and computation is unknown",
    )
    assert shown("distributed_overlap", STEPS).notes == (
        "the traces have no GPU activity: communication is measured on the host, and computation is unknown",
    )


@pytest.mark.parametrize("view", ["collectives", "collective_summary"])
def test_what_computes_during_a_collective_of_the_host_is_unknown(view: str) -> None:
    assert set(shown(view, STEPS, STEPS).values("compute_pct")) == {None}
