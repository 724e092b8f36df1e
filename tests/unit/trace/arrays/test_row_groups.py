"""Rows with equal keys, and trees in preorder."""

import numpy as np
from kineto_trace.arrays.row_groups import below_equals, in_subtrees, places_by_value


def test_a_node_is_in_a_subtree_if_it_or_one_above_it_is_chosen() -> None:
    stop = np.array([4, 3, 3, 4, 6, 6])  # 0(1(2) 3) 4(5)
    assert in_subtrees(np.array([False, True, False, False, False, True]), stop).tolist() == [
        False, True, True, False, False, True
    ]  # fmt: skip
    assert in_subtrees(np.array([True, True, False, False, False, False]), stop).tolist() == [True] * 4 + [False] * 2
    assert in_subtrees(np.zeros(0, np.bool_), stop[:0]).tolist() == []


def test_a_node_is_below_an_equal_one_at_any_distance_and_only_in_its_subtree() -> None:
    stop = np.array([5, 4, 4, 4, 5, 7, 7])  # 0(1(2 3) 4) 5(6); 2 and 3 are leaves
    stop[2] = 3
    assert below_equals(np.array([1, 2, 1, 3, 2, 1, 1]), stop).tolist() == [
        False, False, True, False, False, False, True
    ]  # fmt: skip
    assert below_equals(stop[:0], stop[:0]).tolist() == []


def test_places_by_value_has_each_value_once_with_all_its_places() -> None:
    found = {value: places.tolist() for value, places in places_by_value(np.array([7, -1, 7, 3, -1, 7]))}
    assert found == {-1: [1, 4], 3: [3], 7: [0, 2, 5]}
    assert list(found) == [-1, 3, 7]
    assert list(places_by_value(np.empty(0, np.int64))) == []
