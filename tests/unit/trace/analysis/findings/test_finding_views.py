"""Times in these traces are microseconds."""

from collections.abc import Sequence
from typing import Any

import pytest
from kineto_trace.analysis.findings.finding_views import findings_view
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

US = 1000
Row = dict[str, Any]
HOPPER = {"id": 0, "name": "H", "computeMajor": 9, "computeMinor": 0}


def row(name: str, start: float, end: float, **more: Any) -> Row:
    return {"name": name, "start": int(start * US), "duration": int((end - start) * US), **more}


def found(
    kernels: Sequence[Row],
    calls: Sequence[Row] = (),
    ops: Sequence[Row] = (),
    devices: Sequence[Any] = (),
    **more: Sequence[Row],
) -> dict[str, Row]:
    made = trace(
        {"kernel": kernels, "cuda_runtime": calls, "cpu_op": ops, **more}, length_ns=1000 * US, devices=devices
    )
    return {each["finding"]: each for each in findings_view(Context(made)).rows()}


def launched(*kernels: Row) -> list[Row]:
    """Launches of these kernels, long before."""
    return [row("cudaLaunchKernel", -10, -9, thread=1, correlation=each["correlation"]) for each in kernels]


def test_a_host_that_is_late_costs_the_idle_time() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    calls = [row("cudaLaunchKernel", 290, 295, thread=1, correlation=2)]
    ops = [row("aten::slow", 150, 299, thread=1, id=1)]
    rows = found(kernels, calls, ops)
    assert list(rows) == ["host_bound"]
    bound = rows["host_bound"]
    assert (bound["saving_us"], bound["saving_pct"], bound["op"]) == (200.0, 50.0, "aten::slow")
    assert bound["evidence"] == (
        "1 gaps, 0.2 ms idle, more in aten::slow than in any other operator; 2 kernels of 100 us on average"
    )
    assert bound["kernels"] == ["k"]


def test_savings_are_per_step_too_and_sorted() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 390, correlation=2), row("k", 400, 500, correlation=3)]
    calls = [
        row("cudaLaunchKernel", 290, 295, thread=1, correlation=2),
        row("cudaStreamSynchronize", 310, 391, thread=1),
        row("cudaLaunchKernel", 395, 398, thread=1, correlation=3),
    ]
    steps = [row(f"ProfilerStep#{n}", 250 * n, 250 * n + 250, thread=1, id=n + 1) for n in (0, 1)]
    rows = found(kernels, calls, [], user_annotation=steps)
    assert [(name, each["place"], each["saving_us"]) for name, each in rows.items()] == [
        ("host_bound", 1, 200.0),
        ("synchronisation", 2, 10.0),
    ]
    assert rows["host_bound"]["saving_per_step_us"] == 100.0
    assert rows["synchronisation"]["title"].startswith("cudaStreamSynchronize waits for the GPU")


def test_each_operator_that_waits_is_a_finding_of_its_own() -> None:
    kernels = [row("k", 100 * n, 100 * n + 50, correlation=n + 1) for n in range(4)]
    calls = [row("cudaLaunchKernel", 100 * n - 5, 100 * n - 1, thread=1, correlation=n + 1) for n in range(4)]
    calls += [row("cudaStreamSynchronize", 100 * n + 10, 100 * n + 51, thread=1) for n in range(3)]
    ops = [row("aten::item", 100 * n + 9, 100 * n + 52, thread=1, id=n + 1) for n in (0, 1)]
    ops.append(row("aten::nonzero", 209, 252, thread=1, id=3))
    made = trace({"kernel": kernels, "cuda_runtime": calls, "cpu_op": ops}, length_ns=1000 * US)
    rows = findings_view(Context(made)).rows()
    assert [(each["finding"], each["op"], each["saving_us"]) for each in rows] == [
        ("synchronisation", "aten::item", 100.0),
        ("synchronisation", "aten::nonzero", 50.0),
    ]


@pytest.mark.parametrize(
    ("finding", "waits"),
    [
        ("data_loading", row("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 110, 280, thread=1, id=1)),
        ("communication_on_the_host", row("gloo:barrier", 110, 280, thread=1, id=1)),
    ],
)
def test_what_the_host_waits_for_is_a_finding(finding: str, waits: Row) -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    calls = [row("cudaLaunchKernel", 290, 295, thread=1, correlation=2)]
    rows = found(kernels, calls, [waits])
    assert {name: each["saving_us"] for name, each in rows.items()} == {finding: 200.0}


def test_allocation_is_a_finding() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    calls = [row("cudaMalloc", 105, 285, thread=1), row("cudaLaunchKernel", 290, 295, thread=1, correlation=2)]
    assert found(kernels, calls)["allocation"]["saving_us"] == 200.0


def test_communication_that_computation_hides_costs_nothing() -> None:
    nccl = row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 250, correlation=2, stream=9)
    kernels = [row("k", 0, 100, correlation=1), nccl, row("k", 200, 300, correlation=3)]
    rows = found(kernels, launched(*kernels))
    exposed = rows["exposed_communication"]
    assert exposed["saving_us"] == 100.0
    assert exposed["evidence"].startswith("0.2 ms of collectives, 50 % of it while the GPU computes nothing")
    assert exposed["kernels"] == ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"]


def test_pageable_copies_cost_what_no_kernel_hides() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 200, 300, correlation=3)]
    copies = [
        row("Memcpy HtoD (Pageable -> Device)", 50, 180, correlation=4, stream=9),
        row("Memcpy HtoD (Pinned -> Device)", 180, 200, correlation=5, stream=9),
    ]
    rows = found(kernels, launched(*kernels, *copies), gpu_memcpy=copies)
    assert rows["pageable_copies"]["saving_us"] == 80.0


def test_matrix_products_on_ordinary_cores_are_a_finding_where_there_are_others() -> None:
    kernels = [row("ampere_sgemm_128x64_nn", 0, 100, correlation=1), row("nvjet_hsh_128x256", 100, 200, correlation=2)]
    calls = [row("cudaLaunchKernel", 10 * n, 10 * n + 5, thread=1, correlation=n) for n in (1, 2)]
    ops = [row("aten::mm", 0, 50, thread=1, id=1)]
    assert found(kernels, calls, ops, [HOPPER])["no_tensor_cores"]["saving_us"] == 50.0
    assert "no_tensor_cores" not in found(kernels, calls, ops, [{**HOPPER, "computeMajor": 6}])
    assert "no_tensor_cores" not in found(kernels, calls, [row("aten::add", 0, 50, thread=1, id=1)], [HOPPER])


def test_elementwise_kernels_would_be_half_as_long_when_fused() -> None:
    kernels = [row("void at::native::vectorized_elementwise_kernel<4, Add>", 0, 100, correlation=1)]
    kernels.append(row("gemm", 100, 200, correlation=2))
    assert found(kernels, launched(*kernels))["elementwise"]["saving_us"] == 50.0


def test_kernels_with_fewer_blocks_than_multiprocessors_leave_a_part_idle() -> None:
    shape = {"block_x": 32, "block_y": 1, "block_z": 1, "grid_y": 1, "grid_z": 1}
    device = {
        **HOPPER, "numSms": 100, "warpSize": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
        "regsPerBlock": 65536, "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 233472,
    }  # fmt: skip
    kernels = [row("small", 0, 100, correlation=1, grid_x=25, **shape)]
    kernels.append(row("full", 100, 200, correlation=2, grid_x=100, **shape))
    kernels.append(row("short", 200, 209, correlation=3, grid_x=1, **shape))
    rows = found(kernels, launched(*kernels), devices=[device])
    assert rows["small_grids"]["saving_us"] == pytest.approx(75.0)
    assert rows["small_grids"]["kernels"] == ["small"]


def test_what_saves_less_than_half_a_per_cent_is_left_out() -> None:
    kernels = [row("k", 0, 500, correlation=1), row("k", 502, 1000, correlation=2)]
    assert found(kernels, [row("cudaLaunchKernel", 501, 501.5, thread=1, correlation=2)]) == {}


def test_a_trace_without_gpu_activity_has_none_and_says_why() -> None:
    result = findings_view(Context(trace({})))
    assert (result.rows(), result.notes) == ([], ("the trace has no GPU activity",))
