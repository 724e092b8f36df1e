"""CUDA graphs: their launches, and what they ran."""

import io
import json
from typing import Any

import pytest
from kineto_trace.analysis.kernels.graph_views import cuda_graphs
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.context import Context
from support.trace_files import traces
from support.trace_files.h200 import recording


def launch(start: int, correlation: int, name: str = "cudaGraphLaunch") -> dict[str, Any]:
    return {"name": name, "thread": 1, "start": start, "duration": 2_000, "correlation": correlation}


def kernel(name: str, start: int, duration: int, correlation: int, graph: int) -> dict[str, Any]:
    return {
        "name": name, "start": start, "duration": duration, "correlation": correlation, "graph_id": graph,
        "graph_node_id": graph << 32 | start if graph else 0,
    }  # fmt: skip


def two_graphs(*, with_ids: bool) -> Context:
    small, large = (7, 9) if with_ids else (0, 0)
    return Context(
        traces.trace(
            {
                "cpu_op": [{"name": "Compiled", "thread": 1, "start": 0, "duration": 5_000, "id": 1, "finished": 1}],
                "cuda_runtime": [
                    launch(1_000, 1), launch(10_000, 2), launch(20_000, 3, "cudaLaunchKernel"), launch(30_000, 4)
                ],
                "kernel": [
                    kernel("gemm", 3_000, 4_000, 1, large), kernel("relu", 7_000, 1_000, 1, large),
                    kernel("add", 12_000, 500, 2, small), kernel("alone", 22_000, 9_000, 3, 0),
                    kernel("add", 32_000, 700, 4, small), kernel("gone", 40_000, 100, 77, 5 if with_ids else 0),
                ],
                "gpu_memset": [
                    {"name": "Memset", "start": 8_500, "duration": 500, "correlation": 1, "graph_id": large}
                ],
            }
        )
    )  # fmt: skip


def test_each_graph_has_its_launches_and_what_they_ran() -> None:
    rows = cuda_graphs(two_graphs(with_ids=True)).rows()
    assert [(row["graph"], row["launches"], row["kernels"], row["copies_and_fills"]) for row in rows] == [
        (9, 1, 2, 1), (7, 2, 1, 0), (5, 1, 1, 0)
    ]  # fmt: skip
    assert [(row["gpu_us"], row["span_us"], row["total_us"]) for row in rows] == [
        (5.5, 6.0, 5.5), (pytest.approx(0.6), pytest.approx(0.6), 1.2), (0.1, 0.1, 0.1)
    ]  # fmt: skip
    assert [(row["launched_by"], row["top_kernel"], row["call_us"]) for row in rows] == [
        ("Compiled", "gemm", 2.0), (None, "add", 2.0), (None, "gone", None)
    ]  # fmt: skip
    assert [row["share_pct"] for row in rows] == [pytest.approx(100 * part / 15.8) for part in (5.5, 1.2, 0.1)]


def test_without_ids_launches_that_ran_the_same_are_one_graph_and_the_view_says_so() -> None:
    found = cuda_graphs(two_graphs(with_ids=False))
    assert [(row["graph"], row["launches"], row["top_kernel"]) for row in found.rows()] == [
        (None, 1, "gemm"), (None, 2, "add")
    ]  # fmt: skip
    assert any("does not record which graph" in note for note in found.notes)


def test_a_trace_without_graphs_says_so() -> None:
    found = cuda_graphs(Context(traces.trace({"kernel": [kernel("k", 1, 2, 3, 0)]})))
    assert (found.rows(), found.notes) == ([], ("no CUDA graph was launched while the trace was recorded",))


def test_the_graph_that_kineto_recorded_on_a_gpu_has_forty_kernels_a_launch() -> None:
    (row,) = cuda_graphs(
        Context(load_chrome(io.BytesIO(json.dumps(recording("graph-cupti130001").kineto).encode())))
    ).rows()
    assert (row["launches"], row["kernels"]) == (10, 40)
    assert row["share_pct"] > 90
