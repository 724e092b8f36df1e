"""The interval algebra, by hand and against sets of points."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.arrays.intervals import (
    Union,
    active_sets,
    ascending,
    containing,
    covered,
    cut,
    difference,
    intersection,
    union,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30)


def made(*pairs: tuple[int, int]) -> Union:
    start = np.array([low for low, _ in pairs], np.int64)
    return union(start, np.array([high for _, high in pairs], np.int64))


def pairs(found: Union) -> list[tuple[int, int]]:
    return list(zip(found.start.tolist(), found.end.tolist(), strict=True))


def points(found: Union) -> set[int]:
    return {point for low, high in pairs(found) for point in range(low, high)}


def test_overlapping_and_touching_intervals_become_one() -> None:
    assert pairs(made((5, 9), (0, 3), (2, 4), (9, 10))) == [(0, 4), (5, 10)]


def test_without_intervals_the_union_is_empty() -> None:
    assert pairs(made()) == []
    assert made().before(np.array([1, 2])).tolist() == [0, 0]


def test_what_is_covered_between_two_times() -> None:
    found = made((10, 20), (30, 40))
    assert found.within(np.array([0, 15, 35]), np.array([12, 32, 99])).tolist() == [2, 7, 5]
    assert covered(np.array([10, 15]), np.array([20, 30]), 12, 28) == 16


@given(PAIRS, PAIRS)
def test_unions_behave_as_sets_of_points(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, two = (made(*((low, low + length) for low, length in rows)) for rows in (first, second))
    assert points(one) == {point for low, length in first for point in range(low, low + length)}
    assert points(intersection(one, two)) == points(one) & points(two)
    assert points(difference(one, two)) == points(one) - points(two)
    times = np.arange(60)
    assert one.before(times).tolist() == [sum(point < time for point in points(one)) for time in times.tolist()]


def test_a_time_lies_in_the_interval_that_began_last_before_it_and_has_not_ended() -> None:
    start, end = np.array([10, 20, 40]), np.array([15, 40, 50])
    times = np.array([9, 10, 14, 15, 20, 39, 40, 49, 50])
    assert containing(start, end, times).tolist() == [-1, 0, 0, -1, 1, 1, 2, 2, -1]
    assert containing(start[:0], end[:0], times[:2]).tolist() == [-1, -1]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_a_stretch_has_a_bit_for_each_set_that_is_active() -> None:
    found = active_sets([Union(ints(0, 10), ints(4, 14)), Union(ints(2), ints(12))])
    assert list(found.at(ints(-1, 0, 2, 4, 10, 12, 14, 20))) == [0, 1, 3, 2, 3, 1, 0, 0]
    assert list(active_sets([]).at(ints(0, 5))) == [0, 0]


def test_intervals_are_cut_at_the_times_inside_them() -> None:
    pieces = cut(ints(0, 10, 30), ints(10, 20, 31), ints(0, 3, 10, 15, 15, 20, 40))
    assert list(zip(*(column.tolist() for column in pieces), strict=True)) == [
        (0, 0, 3),
        (0, 3, 10),
        (1, 10, 15),
        (1, 15, 20),
        (2, 30, 31),
    ]


def test_times_ascend_and_are_there_once() -> None:
    assert ascending(ints(3, 1, 2, 3, 1)).tolist() == [1, 2, 3]
    assert ascending(ints()).tolist() == []


def test_without_times_intervals_stay_whole_and_empty_ones_are_left_out() -> None:
    pieces = cut(ints(5, 7), ints(5, 9), ints())
    assert (pieces.owner.tolist(), pieces.start.tolist(), pieces.end.tolist()) == ([1], [7], [9])
