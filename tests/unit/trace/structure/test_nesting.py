""""""

from typing import Any

import numpy as np
import pytest
from kineto_trace.arrays.codec import Events
from kineto_trace.decode.decoded import Submissions
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import NO_ROW, Table, make_table
from kineto_trace.structure.nesting import (
    KINDS,
    EventTree,
    attribute,
    build,
    gpu_annotations,
    levels,
    nest,
    recorded,
    unrecorded,
)
from support.trace_files import traces
from support.trace_files.op_tables import random_intervals, spans, table

START = traces.START_NS
WINDOW_END = 1000
NAMES = ("start", "duration", "name", "device", "stream", "external_id")


@pytest.mark.parametrize("thread", [0, 1, 2, 3])
def test_the_tree_of_one_thread_is_that_of_its_events_alone(thread: int) -> None:
    random = np.random.default_rng(7)
    threads, start = random.integers(0, 3, 300), random.integers(0, 1000, 300)
    end = start + random.integers(0, 200, 300)
    own = np.flatnonzero(threads == thread)
    found, alone = (
        nest(Events(threads, start, end), 2000).of_thread(thread),
        nest(Events(threads[own], start[own], end[own]), 2000),
    )
    assert found.order.tolist() == own[alone.order.astype(np.int64)].tolist()
    assert [column.tolist() for column in found.tree] == [column.tolist() for column in alone.tree]
    moments = np.arange(1200)
    asked = np.full(len(moments), thread, np.uint32)
    assert found.innermost(asked, moments).tolist() == alone.innermost(asked, moments).tolist()


def test_a_table_is_recorded_where_all_of_its_sources_were() -> None:
    first = SourceCoverage(source="a", kinds=("cpu_op",), missing=((START, START + 10), (START + 90, START + 2000)))
    second = SourceCoverage(source="b", kinds=("cpu_op", "kernel"), missing=((START + 5, START + 20),))
    trace = traces.trace({}, length_ns=100, coverage=(first, second))
    assert [(a - START, b - START) for a, b in zip(*unrecorded(trace, ("cpu_op",)), strict=True)] == [
        (0, 20),
        (90, 100),
    ]
    assert [(a - START, b - START) for a, b in zip(*recorded(trace, ("kernel",)), strict=True)] == [(0, 5), (20, 100)]
    assert recorded(trace, ("python_function",)).length() == 100
    assert unrecorded(traces.trace({}), ("cpu_op",)).length() == 0


def outline(tree: EventTree) -> list[tuple[str, int, int]]:
    """Kind, row and depth of every node in preorder."""
    return [
        (KINDS[kind], int(row), int(depth)) for kind, row, depth in zip(tree.kind, tree.row, tree.depth, strict=True)
    ]


def test_ops_nest_by_time_whatever_their_order_of_record() -> None:
    ops = spans("cpu_op", (20, 30), (0, 100), (22, 25), (50, 60), (100, 110))
    tree = build({"cpu_op": ops}, WINDOW_END)
    assert tree.row.tolist() == [1, 0, 2, 3, 4]
    assert tree.parent.tolist() == [NO_ROW, 0, 1, 0, NO_ROW]
    assert tree.depth.tolist() == [0, 1, 2, 1, 0]
    assert tree.children.tolist() == [2, 1, 0, 0, 0]
    assert tree.self_ns.tolist() == [80, 7, 3, 10, 10]


def test_threads_have_trees_of_their_own() -> None:
    tree = build({"cpu_op": spans("cpu_op", (0, 100), (10, 20), (5, 90), thread=[2, 1, 1])}, WINDOW_END)
    assert tree.thread.tolist() == [1, 1, 2]
    assert tree.depth.tolist() == [0, 1, 0]
    assert tree.parent.tolist() == [NO_ROW, 0, NO_ROW]


def test_of_equal_intervals_python_is_outside_and_ops_are_inside() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10), (0, 10)),
        "python_function": spans("python_function", (0, 10)),
        "user_annotation": spans("user_annotation", (0, 10)),
    }
    assert outline(build(tables, WINDOW_END)) == [
        ("python_function", 0, 0),
        ("user_annotation", 0, 1),
        ("cpu_op", 0, 2),
        ("cpu_op", 1, 3),
    ]


def test_an_event_that_outlives_its_parent_ends_with_it() -> None:
    tree = build({"cpu_op": spans("cpu_op", (0, 50), (40, 80), (60, 70))}, WINDOW_END)
    assert tree.end.tolist() == [50, 50, 70]
    assert tree.parent.tolist() == [NO_ROW, 0, NO_ROW]
    assert tree.self_ns.tolist() == [40, 10, 10]


def test_what_starts_when_another_event_ends_is_not_inside() -> None:
    assert build({"cpu_op": spans("cpu_op", (0, 50), (50, 80))}, WINDOW_END).depth.tolist() == [0, 0]


def test_unfinished_events_end_with_the_enclosing_event_or_the_window() -> None:
    ops = spans("cpu_op", (0, 100), (50, 60), (70, 80), (200, 210), (220, 230), finished=[1, 0, 1, 0, 1])
    tree = build({"cpu_op": ops}, WINDOW_END)
    assert tree.end.tolist() == [100, 100, 80, WINDOW_END, 230]
    assert tree.parent.tolist() == [NO_ROW, 0, 1, NO_ROW, 3]


def test_an_empty_trace_has_an_empty_tree() -> None:
    tree = build({}, WINDOW_END)
    assert (len(tree), len(tree.event_index)) == (0, 0)


def test_the_event_index_counts_all_threads_by_start() -> None:
    tree = build({"cpu_op": spans("cpu_op", (0, 10), (30, 40), (20, 30), thread=[1, 1, 2])}, WINDOW_END)
    assert tree.event_index.tolist() == [0, 2, 1]


def test_rows_are_found_in_the_tree() -> None:
    tables = {"cpu_op": spans("cpu_op", (20, 30), (0, 100)), "user_annotation": spans("user_annotation", (0, 200))}
    tree = build(tables, WINDOW_END)
    assert tree.nodes_of("cpu_op", 2).tolist() == [2, 1]
    assert tree.nodes_of("python_function", 3).tolist() == [NO_ROW] * 3
    assert tree.innermost(np.array([1, 1, 2]), np.array([25, 150, 25])).tolist() == [2, 0, NO_ROW]


# ------------------------------------------------------------ sampled Python


def sampled(*intervals: tuple[int, int]) -> Table:
    return spans("python_function", *intervals, samples=[1] * len(intervals))


def test_sampled_slices_are_left_out_unless_asked_for() -> None:
    tables = {"python_function": sampled((0, 100)), "cpu_op": spans("cpu_op", (10, 20))}
    assert len(build(tables, WINDOW_END)) == 1
    assert len(build(tables, WINDOW_END, sample_period_ns=50)) == 2


def test_a_sampled_slice_that_begins_inside_an_op_and_outlives_it_called_it() -> None:
    tables = {"python_function": sampled((15, 115)), "cpu_op": spans("cpu_op", (10, 20), (12, 18), (30, 40))}
    tree = build(tables, WINDOW_END, sample_period_ns=50)
    assert outline(tree) == [("python_function", 0, 0), ("cpu_op", 0, 1), ("cpu_op", 1, 2), ("cpu_op", 2, 1)]
    assert tree.end.tolist() == [115, 20, 18, 40]


def test_a_sampled_slice_that_is_gone_when_an_op_is_sampled_ended_before_the_op() -> None:
    tables = {"python_function": sampled((0, 100), (100, 200)), "cpu_op": spans("cpu_op", (90, 120))}
    tree = build(tables, WINDOW_END, sample_period_ns=50)
    assert outline(tree) == [("python_function", 0, 0), ("python_function", 1, 0), ("cpu_op", 0, 1)]
    assert tree.end.tolist() == [90, 200, 120]


def test_a_sampled_slice_that_was_last_seen_inside_an_op_ends_with_it() -> None:
    tables = {"python_function": sampled((0, 150)), "cpu_op": spans("cpu_op", (90, 160))}
    tree = build(tables, WINDOW_END, sample_period_ns=50)
    assert outline(tree) == [("python_function", 0, 0), ("cpu_op", 0, 1)]
    assert tree.end.tolist() == [160, 160]


def test_a_sampled_slice_inside_an_op_stays_there() -> None:
    tables = {"python_function": sampled((50, 100)), "cpu_op": spans("cpu_op", (0, 200))}
    assert outline(build(tables, WINDOW_END, sample_period_ns=50)) == [("cpu_op", 0, 0), ("python_function", 0, 1)]


def test_sampled_slices_never_cut_ops() -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        edges = np.cumsum(random.integers(1, 30, 60)).tolist()
        ops = spans("cpu_op", *zip(edges[::2], edges[1::2], strict=True))
        ticks = np.sort(random.choice(edges[-1], 12, replace=False)).tolist()
        slices = sampled(*zip(ticks, ticks[1:], strict=False), (ticks[0], ticks[-1]))
        tree = build({"cpu_op": ops, "python_function": slices}, WINDOW_END, sample_period_ns=edges[-1] // 12)
        nodes = tree.nodes_of("cpu_op", len(ops))
        assert (tree.end[nodes] == ops.end()).all(), seed


# ------------------------------------------------------------ against a plain reference


def reference(rows: list[tuple[int, int, int, int]], window_end: int) -> dict[int, tuple[int | None, int, int]]:
    """Of (thread, start, end or -1, kind) rows: parent, end and self time of each, with a stack of Python objects."""
    found: dict[int, tuple[int | None, int]] = {}
    order = sorted(
        range(len(rows)),
        key=lambda row: (rows[row][1], -rows[row][2] if rows[row][2] >= 0 else -(10**9), rows[row][3], row),
    )
    for thread in {row[0] for row in rows}:
        stack: list[int] = []
        for row in (row for row in order if rows[row][0] == thread):
            _, start, end, _ = rows[row]
            while stack and found[stack[-1]][1] <= start:
                stack.pop()
            limit = found[stack[-1]][1] if stack else (window_end if end < 0 else end)
            found[row] = (stack[-1] if stack else None, max(start, limit if end < 0 else min(end, limit)))
            stack.append(row)
    inside = dict.fromkeys(found, 0)
    for row, (parent, end) in found.items():
        if parent is not None:
            inside[parent] += end - rows[row][1]
    return {row: (parent, end, end - rows[row][1] - inside[row]) for row, (parent, end) in found.items()}


def events_of(tables: dict[str, Table]) -> list[tuple[int, int, int, int]]:
    rows = []
    for kind in KINDS:
        columns = tables[kind].columns
        finished = columns.get("finished", np.ones(len(tables[kind])))
        for thread, start, duration, ended in zip(
            columns["thread"].tolist(), columns["start"].tolist(), columns["duration"].tolist(), finished, strict=True
        ):
            rows.append((thread, start, start + duration if ended else -1, KINDS.index(kind)))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_random_events_nest_as_a_plain_stack_says(seed: int) -> None:
    tables = {}
    for number, kind in enumerate(KINDS):
        columns: dict[str, Any] = random_intervals(seed * 3 + number, 60)
        if kind == "python_function":
            del columns["finished"], columns["id"]
        tables[kind] = make_table(kind, 60, columns)
    tree = build(tables, 70)
    expected = reference(events_of(tables), 70)
    number_of = [int(kind) * 60 + int(row) for kind, row in zip(tree.kind, tree.row, strict=True)]
    assert sorted(number_of) == list(range(180))
    for node, event in enumerate(number_of):
        parent, end, self_ns = expected[event]
        above = int(tree.parent[node])
        assert (None if above == NO_ROW else number_of[above], tree.end[node], tree.self_ns[node]) == (
            parent,
            end,
            self_ns,
        )
        inside = [other for other in range(node + 1, 180) if other < tree.stop[node]]
        assert tree.children[node] == np.count_nonzero(tree.parent == node)
        assert {int(tree.parent[other]) for other in inside} <= {node, *inside}
        assert all(tree.parent[other] not in (node, *inside) for other in range(int(tree.stop[node]), 180))


@pytest.mark.parametrize("seed", range(10))
def test_the_innermost_event_of_random_moments_is_found(seed: int) -> None:
    tree = build({"cpu_op": make_table("cpu_op", 80, random_intervals(seed, 80))}, 70)
    random = np.random.default_rng(seed)
    thread, time = random.integers(0, 5, 200), random.integers(-2, 80, 200)
    found = tree.innermost(thread, time)
    for number, moment, node in zip(thread.tolist(), time.tolist(), found.tolist(), strict=True):
        around = [n for n in range(80) if tree.thread[n] == number and tree.start[n] <= moment < tree.end[n]]
        assert node == (around[-1] if around else NO_ROW)


def test_a_million_levels_need_no_recursion() -> None:
    count = 1_000_000
    start = np.arange(count)
    columns = {"start": start, "duration": 2 * (count - start), "finished": np.ones(count), "id": start + 1}
    tree = build({"cpu_op": make_table("cpu_op", count, columns)}, 4 * count)
    assert int(tree.depth[-1]) == count - 1
    assert (tree.stop == count).all()


def test_columns_that_make_no_events_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Events(np.zeros(3, np.uint32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="form a tree"):
        Events(np.zeros(3, np.uint32), np.zeros(3, np.int64)).nest(0)


def test_tables_without_rows_do_no_harm() -> None:
    tables = {"cpu_op": table("cpu_op"), "python_function": make_table("python_function", 0, {})}
    assert len(build(tables, WINDOW_END, sample_period_ns=10)) == 0


def test_levels_go_from_the_outside_in() -> None:
    assert [at.tolist() for at in levels(np.array([1, 0, 2, 1]))] == [[1], [0, 3], [2]]
    assert list(levels(np.empty(0, np.int64))) == []


def test_a_call_belongs_to_the_innermost_op_that_runs_when_it_starts() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (10, 30), (12, 17), (12, 40), id=[1, 2, 3], thread=[1, 1, 2]),
        "cuda_runtime": spans("cuda_runtime", (9, 11), (10, 11), (13, 20), (17, 18), (30, 31)),
        "cuda_driver": spans("cuda_driver", (13, 14), thread=[2]),
    }
    result = attribute(tables)
    assert result["cuda_runtime"]["external_id"].tolist() == [0, 1, 2, 1, 0]
    assert result["cuda_driver"]["external_id"].tolist() == [3]


def test_an_op_comes_before_an_annotation_that_is_nearer() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (10, 30), id=[1]),
        "user_annotation": spans("user_annotation", (0, 50), (15, 25), id=[2, 3]),
        "cuda_runtime": spans("cuda_runtime", (20, 21), (40, 41), (60, 61)),
    }
    assert attribute(tables)["cuda_runtime"]["external_id"].tolist() == [1, 2, 0]


def test_gpu_work_belongs_to_what_its_launch_belongs_to() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10), (20, 30)),
        "cuda_runtime": spans("cuda_runtime", (5, 6), correlation=[100]),
        "cuda_driver": spans("cuda_driver", (25, 26), correlation=[101]),
        "kernel": spans("kernel", (90, 95), (40, 50), (60, 70), correlation=[101, 100, 99]),
        "gpu_memcpy": spans("gpu_memcpy", (80, 85), correlation=[100]),
    }
    result = attribute(tables)
    assert result["kernel"]["external_id"].tolist() == [2, 1, 0]
    assert result["gpu_memcpy"]["external_id"].tolist() == [1]


def test_gpu_work_belongs_to_the_op_that_submitted_it_where_its_record_says_so() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10), (20, 30), (0, 40), id=[1, 2, 3], thread=[1, 1, 2]),
        "cuda_driver": spans("cuda_driver", (25, 26), correlation=[101]),
        "kernel": spans("kernel", (90, 95), (40, 50), (60, 70), (80, 81), correlation=[101, 100, 99, 98]),
    }
    submissions = Submissions(
        correlation=np.array([100, 99, 98], np.uint32),
        thread=np.array([1, 2, 1], np.uint32),
        time=np.array([5, 35, 15]),
    )
    assert attribute(tables, [submissions])["kernel"]["external_id"].tolist() == [2, 1, 3, 0]
    assert attribute(tables)["kernel"]["external_id"].tolist() == [2, 0, 0, 0]


def test_all_kernels_of_a_graph_launch_belong_to_one_op() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10)),
        "cuda_runtime": spans("cuda_runtime", (5, 6), correlation=[100]),
        "kernel": spans("kernel", (40, 50), (50, 60), (60, 70), correlation=[100, 100, 100]),
    }
    assert attribute(tables)["kernel"]["external_id"].tolist() == [1, 1, 1]


def test_allocations_belong_by_thread_and_time() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10)),
        "cpu_instant_event": table("cpu_instant_event", {"start": 5}, {"start": 5, "thread": 2}, {"start": 10}),
    }
    assert attribute(tables)["cpu_instant_event"]["external_id"].tolist() == [1, 0, 0]


def test_an_unfinished_op_runs_until_the_end() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 1), finished=[0]),
        "cuda_runtime": spans("cuda_runtime", (500, 501)),
    }
    assert attribute(tables)["cuda_runtime"]["external_id"].tolist() == [1]


def test_tables_to_which_nothing_changes_are_the_same_values() -> None:
    calls, ops = spans("cuda_runtime", (5, 6)), spans("cpu_op", (0, 10))
    assert attribute({"cuda_runtime": calls})["cuda_runtime"] is calls
    far = spans("cuda_runtime", (50, 60))
    result = attribute({"cuda_runtime": far, "cpu_op": ops})
    assert (result["cuda_runtime"] is far, result["cpu_op"] is ops) == (True, True)
    assert attribute({}) == {}


def test_ids_that_are_there_stay_where_nothing_is_found() -> None:
    calls = spans("cuda_runtime", (5, 6), (50, 51), external_id=[77, 78])
    result = attribute({"cuda_runtime": calls, "cpu_op": spans("cpu_op", (0, 10))})
    assert result["cuda_runtime"]["external_id"].tolist() == [1, 78]
    assert calls["external_id"].tolist() == [77, 78]


def test_calls_alone_are_attributed_without_gpu_work_and_gpu_work_without_calls_is_not() -> None:
    kernels = spans("kernel", (5, 6))
    assert attribute({"kernel": kernels, "cpu_op": spans("cpu_op", (0, 10))})["kernel"] is kernels


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_have_the_latest_op_that_runs(seed: int) -> None:
    """Of nested ops the innermost one is the last to start; these here all nest."""
    random = np.random.default_rng(seed)
    edges = np.sort(random.choice(400, 80, replace=False))
    pairs: list[tuple[int, int]] = []
    stack: list[int] = []
    for number, edge in enumerate(edges.tolist()):
        if stack and (random.random() < 0.5 or len(stack) > 79 - number):
            pairs.append((stack.pop(), edge))
        else:
            stack.append(edge)
    ops = spans("cpu_op", *pairs)
    moments = random.integers(0, 400, 100)
    calls = spans("cuda_runtime", *((moment, moment + 1) for moment in moments.tolist()))
    found = attribute({"cpu_op": ops, "cuda_runtime": calls})["cuda_runtime"]["external_id"]
    for moment, external_id in zip(moments.tolist(), found.tolist(), strict=True):
        around = [(start, row + 1) for row, (start, end) in enumerate(pairs) if start <= moment < end]
        assert external_id == max(around, default=(0, 0))[1]


def test_random_rows_do_no_harm() -> None:
    for seed in range(20):
        calls = {name: column for name, column in random_intervals(seed, 30).items() if name not in ("finished", "id")}
        tables = {
            "cpu_op": make_table("cpu_op", 30, random_intervals(seed + 100, 30)),
            "cuda_runtime": make_table("cuda_runtime", 30, {**calls, "correlation": np.arange(30)}),
            "kernel": make_table("kernel", 30, {"correlation": np.arange(20, 50)}),
        }
        result = attribute(tables)
        expected = [*result["cuda_runtime"]["external_id"].tolist()[20:], *[0] * 20]
        assert result["kernel"]["external_id"].tolist() == expected


def rows(result: Table) -> list[tuple[int, ...]]:
    """Sorted by annotation, device and stream."""
    columns = [result[name].tolist() for name in NAMES]
    return sorted(zip(*columns, strict=True), key=lambda row: (row[5], row[3], row[4]))


def parts() -> dict[str, Table]:
    """A step with an optimizer in it; one kernel before, two inside, one after it, and one outside of all."""
    return {
        "user_annotation": spans("user_annotation", (0, 100), (40, 60), id=[1, 2], name=[11, 12]),
        "cuda_runtime": spans("cuda_runtime", *((at, at + 1) for at in (10, 45, 50, 70, 200)), correlation=range(1, 6)),
        "kernel": spans(
            "kernel",
            (20, 30),
            (50, 55),
            (60, 90),
            (95, 99),
            (300, 310),
            correlation=range(1, 6),
            stream=[7, 7, 8, 7, 7],
        ),
    }


def test_the_innermost_annotation_has_a_span_on_each_stream_that_it_used() -> None:
    assert rows(gpu_annotations(parts())) == [
        (20, 79, 11, 0, 7, 1),
        (50, 5, 12, 0, 7, 2),
        (60, 30, 12, 0, 8, 2),
    ]


def test_devices_are_apart_and_copies_count() -> None:
    tables = {
        "user_annotation": spans("user_annotation", (0, 100)),
        "cuda_runtime": spans("cuda_runtime", (10, 11), correlation=[1]),
        "kernel": spans("kernel", (20, 30), (40, 50), correlation=[1, 1], device=[0, 1]),
        "gpu_memcpy": spans("gpu_memcpy", (60, 70), correlation=[1], stream=[7]),
    }
    assert rows(gpu_annotations(tables)) == [(20, 50, 0, 0, 7, 1), (40, 10, 0, 1, 7, 1)]


def test_launches_of_other_threads_do_not_count() -> None:
    tables = {**parts(), "user_annotation": spans("user_annotation", (0, 100), thread=[9])}
    assert rows(gpu_annotations(tables)) == []


def test_missing_parts_give_no_rows() -> None:
    for missing in parts():
        rest = {kind: found for kind, found in parts().items() if kind != missing}
        assert len(gpu_annotations(rest)) == 0
        assert len(gpu_annotations({**rest, missing: table(missing)})) == 0
