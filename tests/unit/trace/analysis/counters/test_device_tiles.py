"""What runs when on a GPU, and how samples are cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.analysis.counters.device_tiles import MAX_GROUPS, DeviceTiles, Runs, device_tiles, pieces_of

Rows = list[tuple[int, int, int]]


def tiled(rows: Rows, *, groups: int = 3, low: int = 0, high: int = 100) -> DeviceTiles:
    start, end, group = np.array(rows, np.int64).reshape(-1, 3).T
    return device_tiles(Runs(start, end, group, groups), low, high)


def said(found: DeviceTiles) -> list[tuple[int, int, int]]:
    """Tiles with the group that runs alone, -1: none, -2: several."""
    groups = [*found.groups.tolist(), -2, -1]
    names = [groups[at] if at < len(groups) else -2 for at in found.column.tolist()]
    return list(zip(found.start.tolist(), found.end.tolist(), names, strict=True))


def test_idle_time_and_groups_alone_have_tiles() -> None:
    assert said(tiled([(10, 20, 1), (20, 30, 0)])) == [(0, 10, -1), (10, 20, 1), (20, 30, 0), (30, 100, -1)]


def test_groups_at_once_have_a_tile_of_their_own() -> None:
    assert said(tiled([(0, 60, 1), (40, 100, 2)])) == [(0, 40, 1), (40, 60, -2), (60, 100, 2)]


def test_a_group_beside_itself_is_alone() -> None:
    found = tiled([(0, 60, 1), (40, 100, 1)])
    assert {name for _, _, name in said(found)} == {1}
    assert (found.total_ns.tolist(), found.shared_ns.tolist()) == ([0, 120, 0], [0, 0, 0])


def test_runs_are_cut_off_at_the_edges_and_those_without_length_are_none() -> None:
    found = tiled([(-50, 10, 0), (90, 500, 1), (50, 50, 2), (300, 400, 2)])
    assert said(found) == [(0, 10, 0), (10, 90, -1), (90, 100, 1)]
    assert found.total_ns.tolist() == [10, 10, 0]


def test_no_runs_are_one_tile_of_idle_time() -> None:
    assert said(tiled([])) == [(0, 100, -1)]


def test_the_same_groups_at_once_share_a_column() -> None:
    found = tiled([(0, 10, 0), (5, 15, 1), (40, 50, 1), (45, 60, 0)])
    several = {column for column, (_, _, name) in zip(found.column.tolist(), said(found), strict=True) if name == -2}
    assert len(several) == 1


def test_groups_beyond_the_columns_are_no_group_alone() -> None:
    rows = [(10 * at, 10 * at + 9, at) for at in range(MAX_GROUPS + 50)]
    rows[0] = (0, 5, 0)  # the shortest
    found = tiled(rows, groups=len(rows), high=10 * len(rows))
    assert len(found.groups) == MAX_GROUPS and 0 not in found.groups.tolist()
    assert found.shared_ns[0] == 5  # of which nothing was told apart


@given(st.lists(st.tuples(st.integers(-20, 120), st.integers(0, 60), st.integers(0, 2)), max_size=12))
def test_tiles_have_no_holes_and_say_what_runs(drawn: Rows) -> None:
    rows = [(start, start + length, group) for start, length, group in drawn]
    found = said(tiled(rows))
    assert [end for _, end, _ in found[:-1]] == [start for start, _, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, 100)
    for start, end, name in found:
        for moment in (start, end - 1):
            running = {group for low, high, group in rows if low <= moment < high}
            assert name == (-1 if not running else -2 if len(running) > 1 else running.pop())


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.integers(0, 2)), max_size=8))
def test_the_shares_of_each_sample_sum_to_one(drawn: Rows) -> None:
    found = tiled([(start, start + length, group) for start, length, group in drawn])
    start = np.array([0, 10, 25, 60])
    pieces = pieces_of(found, start, np.array([10, 25, 50, 100]))
    assert np.allclose(np.bincount(pieces.sample, pieces.share, 4), 1)
