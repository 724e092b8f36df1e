"""Merged stacks, what fits on a page and the two sides of a function, beside a plain recursive reading."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.analysis import flame_trees
from kineto_trace.analysis.flame_trees import (
    ALL_THREADS,
    NS,
    ROOT,
    SAMPLES,
    FlameKind,
    FlameNode,
    FlameTree,
    callees,
    callers,
    find,
    flame_of_rows,
    folded,
    function_totals,
    keys,
    merge_equal_stacks,
    merged_tree,
    timed_tree,
)
from kineto_trace.base.array_types import NOTHING
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.structure.call_forests import CallForest, StackKind
from kineto_trace.view_api.result import Result, make_result

NAMES = ("thread", "main", "step", "op", "kernel")
Path = tuple[str, ...]
Row = tuple[int, list[str], str | None, float | None, int | None]


@st.composite
def forests(draw: Any, most: int = 30) -> CallForest:
    """Calls below one or two threads, in any order that has callers first."""
    count = draw(st.integers(1, most))
    parent, depth = [NOTHING], [0]
    for place in range(1, count):
        above = draw(st.integers(-1, place - 1)) if place < 3 else draw(st.integers(0, place - 1))
        parent.append(above)
        depth.append(0 if above < 0 else depth[above] + 1)
    frame = [0 if above < 0 else draw(st.integers(1, len(NAMES) - 1)) for above in parent]
    own = [0 if above < 0 else draw(st.integers(0, 5_000)) for above in parent]
    kind = [StackKind.THREAD if above < 0 else StackKind.FUNCTION for above in parent]
    nothing = np.zeros(count, np.int64)
    return CallForest(
        parent=np.array(parent, np.int64),
        frame=np.array(frame, np.int64),
        kind=np.array(kind, np.int64),
        own=np.array(own, np.int64),
        thread=nothing,
        start=np.arange(count),
        end=nothing,
        depth=np.array(depth, np.int64),
        frames=list(NAMES),
    )


def path_of(forest: CallForest, place: int) -> Path:
    """The names of a call and of those around it, outermost first."""
    above = int(forest.parent[place])
    own = (forest.frames[int(forest.frame[place])],)
    return own if above < 0 else (*path_of(forest, above), *own)


def own_by_path(forest: CallForest) -> Counter[Path]:
    """What each stack took itself, where that is anything."""
    found: Counter[Path] = Counter()
    for place in range(len(forest)):
        found[path_of(forest, place)] += int(forest.own[place])
    return +found


def tree_paths(tree: FlameTree) -> list[Path]:
    found: dict[int, Path] = {ROOT: ()}
    for place in np.argsort(tree.depth, kind="stable").tolist()[1:]:
        found[place] = (*found[int(tree.parent[place])], tree.name(place))
    return [found[place] for place in range(len(tree))]


def nodes(root: FlameNode) -> Iterator[FlameNode]:
    yield root
    for child in root.children:
        yield from nodes(child)


def totals(own: Counter[Path]) -> Counter[Path]:
    found: Counter[Path] = Counter()
    for path, value in own.items():
        for length in range(len(path) + 1):
            found[path[:length]] += value
    return found


@given(forests())
def test_equal_stacks_are_one_and_totals_are_sums(forest: CallForest) -> None:
    tree = merged_tree([forest])
    paths, naive = tree_paths(tree), own_by_path(forest)
    assert len(set(paths)) == len(paths)
    assert +Counter(dict(zip(paths, tree.own.tolist(), strict=True))) == naive
    assert +Counter(dict(zip(paths, tree.total.tolist(), strict=True))) == totals(naive)


@given(forests(), forests(), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_baseline_has_the_same_stacks_and_its_own_values(ours: CallForest, theirs: CallForest, scale: float) -> None:
    tree = merged_tree([merge_equal_stacks(ours)], [merge_equal_stacks(theirs)], scale)
    paths = tree_paths(tree)
    assert tree.base_own is not None
    for values, forest, factor in ((tree.own, ours, 1.0), (tree.base_own, theirs, scale)):
        naive = Counter({(ALL_THREADS, *path[1:]): value * factor for path, value in own_by_path(forest).items()})
        assert +Counter(dict(zip(paths, values.tolist(), strict=True))) == naive


@given(st.lists(forests(), min_size=2, max_size=3))
def test_several_traces_are_summed_without_their_threads(parts: list[CallForest]) -> None:
    naive: Counter[Path] = Counter()
    for part in parts:
        for path, value in own_by_path(part).items():
            naive[(ALL_THREADS, *path[1:])] += value
    tree = merged_tree(parts)
    assert +Counter(dict(zip(tree_paths(tree), tree.own.tolist(), strict=True))) == naive


@given(forests(60), st.sampled_from([1, 5, 1200]), st.sampled_from([1, 3, 1500]), st.sampled_from([1, 2, 120]))
def test_what_is_folded_keeps_every_sum(forest: CallForest, pixels: int, frames: int, depth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flame_trees, "PIXELS", pixels)
        patch.setattr(flame_trees, "MAX_FRAMES", frames)
        patch.setattr(flame_trees, "MAX_DEPTH", depth)
        tree = merged_tree([forest])
        root = folded(tree, keys(tree))
    assert root.total == int(forest.own.sum())
    kept = [node for node in nodes(root) if node.kind is not FlameKind.OTHERS]
    assert len(kept) <= max(frames, 1) + 1
    assert all(node is root or node.total * pixels >= root.total for node in kept)
    for node in nodes(root):
        assert node.total == node.own + sum(child.total for child in node.children)
        at = node.start
        for child in node.children:
            assert (child.start, child.width) == (at, child.total)
            at += child.width
        named = [child for child in node.children if child.kind is not FlameKind.OTHERS]
        assert [child.total for child in named] == sorted((child.total for child in named), reverse=True)
        assert [child.kind for child in node.children].count(FlameKind.OTHERS) <= 1
    stood_for = sum(node.frames for node in nodes(root))
    assert stood_for == int((tree.total > 0).sum()) + int(root.total == 0)


@given(forests())
def test_a_frame_is_found_by_its_key_and_shown_alone(forest: CallForest) -> None:
    tree = merged_tree([forest])
    known = keys(tree)
    for place in range(len(tree)):
        at = find(known, f"{int(known[place]):x}")
        assert at == place
        assert folded(tree, known, at).total == int(tree.total[place])
    assert [find(known, text) for text in ("", "no number", "f" * 40, "1")] == [ROOT] * 4


@given(forests())
def test_in_order_of_time_every_call_is_one_frame_and_siblings_follow_each_other(forest: CallForest) -> None:
    tree = timed_tree(forest, None)
    root = folded(tree, keys(tree))
    assert root.total == int(forest.own.sum())
    for node in nodes(root):
        assert node.total == node.own + sum(child.total for child in node.children)
        assert [child.start for child in node.children] == sorted(child.start for child in node.children)


def occurrences(forest: CallForest, name: str) -> list[tuple[Path, Path, int]]:
    """For each own value inside the function: the path to its outermost call, the path from there, the value."""
    found = []
    for path, value in own_by_path(forest).items():
        if name in path[1:]:
            at = path.index(name, 1)
            found.append((path[: at + 1], path[at:], value))
    return found


@given(forests(), st.sampled_from(NAMES[1:]))
def test_a_function_has_its_callers_above_and_its_callees_below(forest: CallForest, name: str) -> None:
    tree = merged_tree([forest])
    up: Counter[Path] = Counter()
    down: Counter[Path] = Counter()
    for above, below, value in occurrences(forest, name):
        up[above[::-1]] += value
        down[below] += value
    for side, naive in ((callees(tree, name), down), (callers(tree, name), up)):
        assert +Counter(dict(zip(tree_paths(side), side.own.tolist(), strict=True))) == naive


@given(forests())
def test_recursive_calls_count_once_in_a_functions_total(forest: CallForest) -> None:
    found = function_totals(merged_tree([forest]))
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for path, value in own_by_path(forest).items():
        own[path[-1]] += value
        for name in set(path[1:]):
            total[name] += value
    assert +Counter(dict(zip(found.names, found.own.tolist(), strict=True))) == own
    assert +Counter(dict(zip(found.names, found.total.tolist(), strict=True))) == total
    assert found.own.tolist() == sorted(found.own.tolist(), reverse=True)


def result(*rows: Row) -> Result:
    """Rows of rank, stack, kind of the innermost frame, self time in us, samples."""
    names = ("rank", "stack", "kind", "self_us", "samples")
    given: dict[str, Any] = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    schema = VIEWS["flame_graph"].result_columns
    return make_result("flame_graph", schema, {each.name: given.get(each.name, [None] * len(rows)) for each in schema})


def lines(node: FlameNode, level: int = 0) -> list[str]:
    own = [f"{'  ' * level}{node.name} {node.kind} {node.total}"]
    return own + [line for child in node.children for line in lines(child, level + 1)]


def test_stacks_of_all_ranks_are_merged_below_one_thread() -> None:
    found = flame_of_rows(
        result(
            (0, ["thread 1", "a", "b"], "operator", 3.0, None),
            (0, ["thread 1", "a"], "annotation", 1.0, None),
            (1, ["thread 9", "a", "b"], "operator", 2.0, None),
            (1, ["(others)"], None, 0.5, None),
        )
    )
    assert found is not None
    root, unit = found
    assert unit == NS
    assert lines(root) == [
        "all all 6500",
        "  all threads thread 6000",
        "    a annotation 6000",
        "      b operator 5000",
        "  (others) thread 500",
    ]


def test_a_frame_that_is_in_no_row_of_its_own_is_of_the_kind_of_what_it_called() -> None:
    found = flame_of_rows(result((0, ["thread 1", "f", "g"], "function", None, 4)))
    assert found is not None
    root, unit = found
    assert (unit, lines(root)[2]) == (SAMPLES, "    f function 4")


def test_without_rows_there_is_no_graph() -> None:
    assert flame_of_rows(result()) is None
