import numpy as np
from kineto_trace.arrays.active_sets import active_sets, ascending, cut
from kineto_trace.arrays.intervals import Union


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
