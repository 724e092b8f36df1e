"""Which nodes of captured graphs the kernels of a trace ran."""

import cProfile

import pytest
from kineto_trace.analysis.host_time.operator_views import operators
from kineto_trace.analysis.kernels.graph_views import cuda_graphs, graph_operators
from kineto_trace.analysis.kernels.kernel_views import kernels_by_op
from kineto_trace.formats.flame_graphs import FlameGraph, folded, stacks
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import captured_ops, owners
from kineto_trace.structure.captured_graphs import (
    AMBIGUOUS,
    CHANGED,
    DIFFERENT,
    KNOWN,
    NOT_SEEN,
    captured_graphs,
)
from support.trace_files.captured_graph import NODES, OPS, REPLAY, Row, context, node, op, ran


def owner_names(found: Context) -> list[str]:
    return [found.trace.strings[number] for number in found.get(owners).tolist()]


def state(found: Context) -> str:
    (only,) = found.get(captured_graphs).state.values()
    return only


def test_work_of_a_graph_belongs_to_the_operators_that_captured_it() -> None:
    found = context()
    assert state(found) == KNOWN
    assert owner_names(found) == ["aten::mm", "aten::relu", "aten::relu"]
    assert found.get(captured_ops).tolist() == [1, 2, 2]


def test_a_node_without_an_operator_belongs_to_what_launched_the_graph() -> None:
    found = context(nodes=[node(0, 0, "gemm"), *NODES[1:]])
    assert owner_names(found) == ["Replay", "aten::relu", "aten::relu"]


@pytest.mark.parametrize(
    "kernels",
    [
        [ran("gemm", 0, 1_000)],
        [ran("gemm", 0, 1_000), ran("relu", 2, 1_300)],
        [ran("gemm", 0, 1_000), ran("tanh", 3, 1_300)],
        [ran("gemm", 0, 1_000, grid=9), ran("relu", 3, 1_300)],
        [*REPLAY, ran("relu", 4, 1_500)],
    ],
    ids=["missing", "moved", "another name", "another shape", "one more"],
)
def test_a_graph_whose_kernels_are_not_all_the_same_is_not_that_graph(kernels: list[Row]) -> None:
    found = context(kernels=kernels)
    assert state(found) == DIFFERENT
    assert set(owner_names(found)) == {"Replay"}


def test_copies_may_be_missing_or_be_kernels_of_the_driver_but_nothing_else() -> None:
    driver = ran("memcpy32_post", 1, 1_100, grid=16)
    assert state(context(copies=[])) == KNOWN
    as_kernel = context(copies=[], kernels=[REPLAY[0], driver, REPLAY[1]])
    assert (state(as_kernel), owner_names(as_kernel)) == (KNOWN, ["aten::mm", "aten::relu", "aten::relu"])
    assert state(context(copies=[{**ran("Memcpy DtoD", 2, 1_100), "kind": 8}], kernels=REPLAY)) == DIFFERENT
    assert state(context(copies=[{**ran("Memcpy DtoD", 77, 1_100), "kind": 8}], kernels=REPLAY)) == DIFFERENT


def test_graphs_that_are_alike_are_told_apart_by_nothing_unless_they_agree() -> None:
    again = [{**each, "graph": 1, "operator": each["operator"] + 3 if each["operator"] >= 0 else -1} for each in NODES]
    same = [{**each, "graph": 1, "parent": each["parent"] + 3 if each["parent"] >= 0 else -1} for each in OPS]
    agreeing = context(nodes=NODES + again, ops=OPS + same)
    assert (state(agreeing), agreeing.get(captured_graphs).shapes) == (KNOWN, frozenset((9,)))
    other = [same[0], {**same[1], "inputs": '"Input Dims": [[2, 8]]'}, same[2]]
    of_other_shapes = context(nodes=NODES + again, ops=OPS + other)
    assert (state(of_other_shapes), of_other_shapes.get(captured_graphs).shapes) == (KNOWN, frozenset())
    assert {row["input_shape"] for row in graph_operators(of_other_shapes).rows()} == {None}
    renamed = [same[0], {**same[1], "name": "aten::bmm"}, same[2]]
    differing = context(nodes=NODES + again, ops=OPS + renamed)
    assert (state(differing), set(owner_names(differing))) == (AMBIGUOUS, {"Replay"})


def test_a_graph_that_runs_something_else_in_a_later_replay_is_not_known() -> None:
    found = context(kernels=[*REPLAY, ran("tanh", 3, 9_000, correlation=2)])
    assert (state(found), set(owner_names(found)) <= {"Replay", ""}) == (CHANGED, False)


def test_a_trace_without_captured_graphs_says_so() -> None:
    found = context(nodes=[], ops=[])
    assert state(found) == NOT_SEEN
    result = graph_operators(found)
    assert (result.rows(), result.notes) == (
        [], ("not shown: 1 of 1 CUDA graphs; their operators are not known: the agent saw no capture of a CUDA graph",)
    )  # fmt: skip


def test_the_views_tell_operators_paths_and_inputs() -> None:
    found = context()
    (graph,) = cuda_graphs(found).rows()
    assert (graph["launched_by"], graph["operators"], graph["operators_pct"]) == ("Replay", KNOWN, 100)
    rows = graph_operators(found).rows()
    assert [(row["operator"], row["path"], row["input_shape"], row["calls"], row["launches"]) for row in rows] == [
        ("aten::relu", "forward > aten::relu", None, 1, 1),
        ("aten::mm", "forward > aten::mm", "[[4, 4]]", 1, 1),
    ]
    assert [(row["kernels"], row["copies_and_fills"], row["total_us"], row["top_kernel"]) for row in rows] == [
        (1, 1, 0.2, "relu"), (1, 0, 0.1, "gemm")
    ]  # fmt: skip
    assert sum(row["share_pct"] for row in rows) == pytest.approx(100)


def test_kernels_by_op_has_the_captured_operator_and_whether_it_could_use_tensor_cores() -> None:
    rows = kernels_by_op(context()).rows()
    assert {(row["name"], row["op"], row["op_eligible"]) for row in rows} == {
        ("gemm", "aten::mm", True), ("relu", "aten::relu", False)
    }  # fmt: skip


def test_the_operators_that_ran_have_the_launches_and_a_note_says_where_the_others_are() -> None:
    found = operators(context())
    assert [(row["name"], row["device_self_us"]) for row in found.rows()] == [("Replay", pytest.approx(0.3))]
    assert [note for note in found.notes if "graph_operators" in note]
    assert not [note for note in operators(context(nodes=[], ops=[])).notes if "graph_operators" in note]


def test_flame_graphs_have_the_captured_operators_below_the_launch() -> None:
    lines = folded(stacks(context(), FlameGraph.GPU)).decode().splitlines()
    assert sorted(line.partition(";")[2] for line in lines) == [
        "Replay;forward;aten::mm;gemm 100",
        "Replay;forward;aten::relu;Memcpy DtoD 100",
        "Replay;forward;aten::relu;relu 100",
    ]


def calls_for(count: int) -> int:
    """How many functions are called to find so many captured graphs, with equal kernels of different operators."""
    found = context(
        nodes=[node(graph, 0, "gemm", graph) for graph in range(count)],
        ops=[op(graph, f"op {graph}") for graph in range(count)],
        kernels=[ran("gemm", 0, 1_000 * graph, graph=graph) for graph in range(1, count + 1)],
        copies=[],
    )
    profile = cProfile.Profile()
    state = profile.runcall(captured_graphs, found).state
    assert state == dict.fromkeys(range(1, count + 1), AMBIGUOUS)
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_for_twice_as_many_graphs_that_are_alike_is_twice_as_much() -> None:
    assert calls_for(100) < 2.5 * calls_for(50)
