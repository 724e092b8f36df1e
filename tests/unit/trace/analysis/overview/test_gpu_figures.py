"""Utilization, SM efficiency and occupancy of spans, by hand."""

import math

import numpy as np
import pytest
from kineto_trace.analysis.kernels.precision_views import launch_figures
from kineto_trace.analysis.overview.gpu_figures import busy_share, sm_efficiency, utilization_course, weighted_mean
from kineto_trace.arrays.intervals import union
from kineto_trace.model.context import Context
from support.trace_files import traces


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_the_busy_share_counts_each_moment_once() -> None:
    assert busy_share(union(ints(0, 5, 90), ints(10, 20, 200)), 0, 100) == 0.3
    assert math.isnan(busy_share(union(ints(0), ints(1)), 5, 5))


def test_sm_efficiency_adds_running_kernels_up_to_one() -> None:
    course = sm_efficiency(np.array([0.5, 0.75, 0.0, np.nan]), ints(0, 10, 0, 0), ints(20, 30, 99, 99))
    assert list(zip(*(part.tolist() for part in course), strict=True)) == [(0, 10, 0.5), (10, 20, 1.0), (20, 30, 0.75)]
    assert course.mean(0, 50) == pytest.approx((5 + 10 + 7.5) / 50)
    assert course.mean(15, 25) == pytest.approx((5 + 3.75) / 10)
    assert math.isnan(course.mean(60, 90))


def test_occupancy_is_weighted_by_the_time_inside_the_span() -> None:
    # 10 µs of 20 and 5 µs of 50 lie inside; what is unknown does not count
    value = np.array([20.0, 50.0, np.nan])
    assert weighted_mean(value, ints(0, 35, 0), ints(10, 99, 40), 0, 40) == pytest.approx((200 + 250) / 15)
    assert math.isnan(weighted_mean(value[2:], ints(0), ints(9), 0, 40))


def test_buckets_are_a_power_of_ten_of_microseconds() -> None:
    low, high = 5_000, 5_000 + 1_234_000  # 1234 µs: buckets of 100 µs, the last one of 134
    course = utilization_course(union(ints(low + 50_000, low + 1_100_000), ints(low + 150_000, high)), low, high)
    assert len(course.start) == 12
    assert (course.end - course.start).tolist() == [100_000] * 11 + [134_000]
    assert course.value.tolist() == [0.5, 0.5, *[0] * 9, 1]
    assert len(utilization_course(union(ints(0), ints(1)), 0, 10).start) == 1


def test_launch_figures_are_computed_from_shapes_where_the_device_is_known() -> None:
    shape = {"grid_x": 264, "grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1, "registers": 32}
    trace = traces.trace(
        {"kernel": [{"name": "k", **shape}, {"name": "k", **shape, "device": 1}, {"name": "no shape"}]},
        devices=(traces.H100,),
    )
    found = launch_figures(Context(trace))
    # 264 blocks on 132 multiprocessors; 8 warps each; 2 x 256 of 2048 threads
    assert found.blocks_per_sm.tolist() == pytest.approx([2, np.nan, np.nan], nan_ok=True)
    assert found.warps_per_sm.tolist() == pytest.approx([16, np.nan, np.nan], nan_ok=True)
    assert found.occupancy.tolist() == pytest.approx([25, np.nan, np.nan], nan_ok=True)
