"""A trace of a CUDA graph that was captured while the agent was there, and replayed."""

from typing import Any

from kineto_trace.model.context import Context

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
LAUNCHER = [{"name": "Replay", "thread": 1, "start": 0, "duration": 5_000, "id": 1, "finished": 1, "inputs": -1}]


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
