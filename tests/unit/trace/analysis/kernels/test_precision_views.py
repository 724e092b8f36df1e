"""The precision of kernels, by their names and their operators."""

import json

import pytest
from kineto_trace.analysis.kernels.precision_views import kernel_precision
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.model.context import Context
from support.trace_files import traces
from support.trace_files.hta_events import Event, context, event, launch, op, rows

HALF = json.dumps({"Input Dims": [[4]], "Input type": ["c10::Half"], "Concrete Inputs": [""]})[1:-1]
FMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
ADD = "smsp__sass_thread_inst_executed_op_hadd_pred_on.sum"


def test_kernels_are_told_apart_by_precision() -> None:
    kernels = [
        {"name": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "start": 0, "duration": 200_000},
        {"name": "gemv2T_kernel_val<int, int, __nv_bfloat16>", "start": 300_000, "duration": 100_000},
        {"name": "triton_poi_fused_relu_0", "start": 500_000, "duration": 100_000},
    ]
    rows = kernel_precision(Context(traces.trace({"kernel": kernels}))).rows()
    assert [(row["precision"], row["bits"], row["calls"], row["total_us"]) for row in rows] == [
        ("bf16", 16, 2, 300),
        (None, None, 1, 100),
    ]
    assert [row["share_pct"] for row in rows] == [75, 25]
    assert rows[0]["tensor_core_us"] == 200


def test_unnamed_kernels_have_the_precision_of_their_operators_inputs_and_collectives_do_not_count() -> None:
    ops = [{"name": "aten::relu", "start": 0, "duration": 1_000, "finished": 1, "inputs": HALF}]
    calls = [{"name": "cudaLaunchKernel", "start": 100, "duration": 100, "correlation": 1}]
    kernels = [
        {"name": "relu_kernel", "start": 5_000, "duration": 1_000, "correlation": 1},
        {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "start": 7_000, "duration": 1_000, "correlation": 2},
    ]
    context = Context(traces.trace({"cpu_op": ops, "cuda_runtime": calls, "kernel": kernels}))
    assert [(row["precision"], row["share_pct"]) for row in kernel_precision(context).rows()] == [("fp16", 100)]


def test_a_trace_without_a_gpu_says_so() -> None:
    found = kernel_precision(Context(traces.trace({})))
    assert (found.rows(), len(found.notes)) == ([], 1)


def profiled(name: str, ts: float, **counters: float) -> Event:
    return event("cuda_profiler_range", name, ts, 5, 0, 0, **counters)


@pytest.mark.parametrize("hta", [False, True])
def test_the_nth_range_belongs_to_the_nth_launch(hta: bool) -> None:
    events = [
        *(
            op("aten::linear", 0, 50),
            op("aten::addmm", 5, 20),
            launch(1, 10),
            launch(2, 60, name="cudaLaunchKernelExC"),
        ),
        *(profiled("second", 90, cycles=7), profiled("first", 80, **{FMA: 10, ADD: 3})),
    ]
    columns = ("kernel", "op_stack", "top_op", "bottom_op", "counter", "value", "flop")
    stack = ["aten::linear", "aten::addmm"]
    assert rows(events, "counters_with_operators", *columns, hta=hta) == [
        ("first", stack, "aten::linear", "aten::addmm", FMA, 10, 20),
        ("first", stack, "aten::linear", "aten::addmm", ADD, 3, 3),
        ("second", [], None, None, "cycles", 7, None),
    ]


def test_ranges_that_cannot_be_paired_are_told_of() -> None:
    result = find_view("counters_with_operators")(context([profiled("a", 1, cycles=1)]))
    assert result.notes == ("1 profiled range cannot be matched with 0 calls of cudaLaunchKernel…",)
    result = find_view("counters_with_operators")(context([launch(1, 0)]))
    assert result.notes == ("the trace has no events of the category cuda_profiler_range",)
