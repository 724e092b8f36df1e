"""Means of samples, weighted by their lengths."""

import math

import numpy as np
from kineto_trace.spool.counter_samples import row_type
from kinetod.counters.sample_means import SampleMeans


def rows(*samples: tuple[int, int, tuple[float, float]]) -> np.ndarray:
    return np.array([*samples], dtype=row_type(2))


def test_a_long_sample_counts_for_more_than_a_short_one() -> None:
    found = SampleMeans(2)
    found.add(rows((100, 130, (10, 1)), (130, 140, (50, 2))))
    found.add(rows((140, 150, (50, 3))))
    assert found.means() == [26.0, 1.6]
    assert found.maxima() == [50.0, 3.0]
    assert (found.start_ns, found.end_ns, found.samples) == (100, 150, 3)


def test_a_sample_without_a_value_counts_for_the_other_metrics_only() -> None:
    found = SampleMeans(2)
    found.add(rows((0, 10, (math.nan, 1)), (10, 20, (math.inf, 3)), (20, 30, (5, 5))))
    assert found.means() == [5.0, 3.0] and found.maxima() == [5.0, 5.0]


def test_no_samples_have_no_mean() -> None:
    found = SampleMeans(2)
    found.add(rows()[:0])
    assert all(map(math.isnan, [*found.means(), *found.maxima()])) and found.samples == 0
