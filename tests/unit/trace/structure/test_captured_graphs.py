"""Which nodes of captured graphs the kernels of a trace ran."""

from typing import Any

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
from support.trace_files import traces

KERNEL, COPY, FILL, EMPTY = 0, 1, 2, 5
Row = dict[str, Any]


def node(graph: int, number: int, name: str, operator: int = -1, kind: int = KERNEL, grid: int = 8) -> Row:
    shape = {"grid_x": grid, "grid_y": 1, "grid_z": 1, "block_x": 128, "block_y": 1, "block_z": 1}
    return {"graph": graph, "node": number, "type": kind, "operator": operator} | (
        {"name": name, **shape} if kind == KERNEL else {"name": ""}
    )


def op(graph: int, name: str, parent: int = -1, inputs: str = "") -> Row:
    return {"graph": graph, "name": name, "parent": parent, "scope": 0} | ({"inputs": inputs} if inputs else {})


def ran(name: str, number: int, start: int, graph: int = 9, grid: int = 8, correlation: int = 1) -> Row:
    return {
        "name": name, "start": start, "duration": 100, "correlation": correlation, "graph_id": graph,
        "graph_node_id": graph << 32 | number, "grid_x": grid, "grid_y": 1, "grid_z": 1, "block_x": 128,
        "block_y": 1, "block_z": 1,
    }  # fmt: skip


NODES = [node(0, 0, "gemm", 1), node(0, 1, "", 2, COPY), node(0, 2, "", -1, EMPTY), node(0, 3, "relu", 2)]
OPS = [op(0, "forward"), op(0, "aten::mm", 0, '"Input Dims": [[4, 4]]'), op(0, "aten::relu", 0)]
REPLAY = [ran("gemm", 0, 1_000), ran("relu", 3, 1_300)]
COPIES = [{**ran("Memcpy DtoD", 1, 1_100), "kind": 8}]
LAUNCH = [{"name": "cudaGraphLaunch", "thread": 1, "start": 500, "duration": 50, "correlation": 1}]
LAUNCHER = [{"name": "Replay", "thread": 1, "start": 0, "duration": 5_000, "id": 1, "finished": 1}]


def context(
    *, nodes: list[Row] = NODES, ops: list[Row] = OPS, kernels: list[Row] = REPLAY, copies: list[Row] = COPIES
) -> Context:
    names = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
    return Context(
        traces.trace(
            {
                "cpu_op": LAUNCHER,
                "cuda_runtime": LAUNCH,
                "kernel": kernels,
                "gpu_memcpy": [{key: value for key, value in row.items() if key not in names} for row in copies],
                "graph_node": nodes,
                "graph_op": ops,
            }
        )
    )


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
        [], ("1 of 1 CUDA graphs are missing: operators not known: the agent saw no capture of a CUDA graph",)
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
