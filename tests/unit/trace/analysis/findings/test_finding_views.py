"""Times in these traces are microseconds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings import finding_views
from kineto_trace.analysis.findings.finding_views import findings, findings_view
from kineto_trace.decode.python_stacks import Samples, Trie, slices
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES
from kineto_trace.model.trace import NO_STRING, StringTable, Trace
from support.trace_files.sampled_stacks import MAIN, THREAD, stack_rows
from support.trace_files.simulated.host_and_gpu import US, Program
from support.trace_files.simulated.training_job import ddp, fsdp, host_bound, simulate
from support.trace_files.traces import START_NS, table, target, trace

MS = 1_000_000
Row = dict[str, Any]
GUESSES = ("unknown_idle", "queued", "kernel_gaps")
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
    return {
        each["finding"]: each for each in listed(kernels, calls, ops, devices, **more) if each["finding"] not in GUESSES
    }


def listed(
    kernels: Sequence[Row],
    calls: Sequence[Row] = (),
    ops: Sequence[Row] = (),
    devices: Sequence[Any] = (),
    **more: Sequence[Row],
) -> list[Row]:
    """The findings of a trace whose window ends with its last GPU activity."""
    length = max(each["start"] + each["duration"] for each in (*kernels, *more.get("gpu_memcpy", ())))
    made = trace({"kernel": kernels, "cuda_runtime": calls, "cpu_op": ops, **more}, length_ns=length, devices=devices)
    return findings_view(Context(made)).rows()


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
    assert (bound["saving_us"], bound["saving_pct"], bound["op"]) == (140.0, 35.0, "aten::slow")
    assert bound["evidence"] == "1 gap, 150 µs idle, 140 µs of it in aten::slow; 2 kernels of 100 µs on average"
    assert bound["kernels"] == ["k"]


def test_savings_are_per_step_too_and_sorted() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 390, correlation=2), row("k", 400, 500, correlation=3)]
    calls = [
        row("cudaLaunchKernel", 290, 295, thread=1, correlation=2),
        row("cudaStreamSynchronize", 310, 391, thread=1),
        row("cudaLaunchKernel", 395, 398, thread=1, correlation=3),
    ]
    steps = [row(f"ProfilerStep#{n}", 250 * n, 250 * n + 250, thread=1, id=n + 1, finished=1) for n in (0, 1)]
    rows = found(kernels, calls, [row("aten::slow", 90, 299, thread=1, id=9, finished=1)], user_annotation=steps)
    assert [(name, each["place"], each["saving_us"]) for name, each in rows.items()] == [
        ("host_bound", 1, 195.0),
        ("synchronisation", 2, 10.0),
    ]
    assert rows["host_bound"]["saving_per_step_us"] == 97.5
    assert rows["synchronisation"]["title"].startswith("cudaStreamSynchronize waits for the GPU")


def test_each_operator_that_waits_is_a_finding_of_its_own() -> None:
    kernels = [row("k", 100 * n, 100 * n + 50, correlation=n + 1) for n in range(4)]
    calls = [row("cudaLaunchKernel", 100 * n - 5, 100 * n - 1, thread=1, correlation=n + 1) for n in range(4)]
    calls += [row("cudaStreamSynchronize", 100 * n + 10, 100 * n + 51, thread=1) for n in range(3)]
    ops = [row("aten::item", 100 * n + 9, 100 * n + 52, thread=1, id=n + 1) for n in (0, 1)]
    ops.append(row("aten::nonzero", 209, 252, thread=1, id=3))
    rows = listed(kernels, calls, ops)
    assert [(each["finding"], each["op"], each["saving_us"]) for each in rows] == [
        ("synchronisation", "aten::item", pytest.approx(76.0, abs=0.01)),  # the host has other work, too
        ("synchronisation", "aten::nonzero", pytest.approx(38.0, abs=0.01)),
    ]


@pytest.mark.parametrize(
    ("around", "advice"),
    [("aten::item", "Do not read results from the GPU"), ("aten::other", "Take torch.cuda.synchronize()")],
)
def test_a_wait_outside_of_operators_is_to_be_taken_out_and_one_in_an_operator_reads_results(
    around: str, advice: str
) -> None:
    kernels = [row("k", 100 * n, 100 * n + 50, correlation=n + 1) for n in range(2)]
    calls = [row("cudaLaunchKernel", 100 * n - 5, 100 * n - 1, thread=1, correlation=n + 1) for n in range(2)]
    calls.append(row("cudaDeviceSynchronize", 10, 51, thread=1))
    start = 9 if around == "aten::item" else 94
    ops = [row(around, start, start + 43 if start == 9 else 99, thread=1, id=1)]
    assert found(kernels, calls, ops)["synchronisation"]["advice"].startswith(advice)


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
    assert {name: each["saving_us"] for name, each in rows.items()} == {finding: 170.0, "host_bound": 10.0}


@pytest.mark.parametrize(("loader", "told"), [("_SingleProcess", True), ("_MultiProcessing", False)])
def test_a_loader_without_workers_is_told(loader: str, told: bool) -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    calls = [row("cudaLaunchKernel", 290, 295, thread=1, correlation=2)]
    waits = row(f"enumerate(DataLoader)#{loader}DataLoaderIter.__next__", 110, 280, thread=1, id=1)
    assert ("num_workers=0" in found(kernels, calls, [waits])["data_loading"]["evidence"]) is told


def test_the_uncertainty_is_the_spread_over_the_steps() -> None:
    """In each step the GPU works for 50 us, after the host was busy for 70, 100 and 130 us."""
    ends = [120, 270, 450]
    kernels = [row("k", end - 50, end, correlation=n + 1) for n, end in enumerate(ends)]
    calls = [row("cudaLaunchKernel", end - 52, end - 51, thread=1, correlation=n + 1) for n, end in enumerate(ends)]
    steps = [row(f"ProfilerStep#{n}", low, high, thread=1, id=n + 1, finished=1)
             for n, (low, high) in enumerate([(0, 120), (120, 270), (270, 450)])]  # fmt: skip
    ops = [row("aten::slow", 0, 450, thread=1, id=9, finished=1)]
    bound = found(kernels, calls, ops, user_annotation=steps)["host_bound"]
    assert bound["saving_us"] == 298.0
    assert bound["uncertainty_pct"] == pytest.approx(100 * 1.96 * 30 * 3**0.5 / 450, rel=0.01)
    alone = found(kernels[:1], calls[:1], ops, user_annotation=steps[:1])["host_bound"]
    assert alone["uncertainty_pct"] is None


def test_a_share_is_no_further_off_than_100_per_cent() -> None:
    """Nearly all idle time of three steps lies in the last one."""
    ends = [60, 120, 10_000]
    kernels = [row("k", end - 50, end, correlation=n + 1) for n, end in enumerate(ends)]
    calls = [row("cudaLaunchKernel", end - 52, end - 51, thread=1, correlation=n + 1) for n, end in enumerate(ends)]
    steps = [row(f"ProfilerStep#{n}", low, high, thread=1, id=n + 1, finished=1)
             for n, (low, high) in enumerate(zip([0, *ends], ends))]  # fmt: skip
    ops = [row("aten::slow", 0, 10_000, thread=1, id=9, finished=1)]
    assert found(kernels, calls, ops, user_annotation=steps)["host_bound"]["uncertainty_pct"] == 100


def test_allocation_is_a_finding() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    calls = [row("cudaMalloc", 105, 285, thread=1), row("cudaLaunchKernel", 290, 295, thread=1, correlation=2)]
    assert found(kernels, calls)["allocation"]["saving_us"] == pytest.approx(180.0, abs=0.01)


def reduces(*spans: tuple[float, float]) -> list[Row]:
    return [
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", *span, correlation=100 + n, stream=9)
        for n, span in enumerate(spans)
    ]


def test_communication_that_computation_hides_costs_nothing() -> None:
    nccl = reduces((50, 250))
    kernels = [row("k", 0, 100, correlation=1), *nccl, row("k", 251, 300, correlation=3)]
    rows = found(kernels, launched(*kernels))
    assert list(rows) == ["exposed_communication"]
    exposed = rows["exposed_communication"]
    assert exposed["saving_us"] == 150.0
    assert exposed["evidence"] == (
        "200 µs of collectives, 75 % of it while the GPU computes nothing; at most 150 µs of that is transfer "
        "(150 µs without similar collectives to compare with)"
    )
    assert exposed["kernels"] == ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"]


def test_computation_that_did_not_wait_for_a_collective_gains_nothing_from_a_shorter_one() -> None:
    kernels = [row("k", 0, 100, correlation=1), *reduces((50, 250)), row("k", 200, 300, correlation=3)]
    assert found(kernels, launched(*kernels)) == {}


def test_what_a_collective_takes_beyond_others_alike_is_waiting_and_no_transfer() -> None:
    nccl = reduces((100, 110), (210, 220), (320, 500))
    kernels = [row("k", start, end, correlation=n) for n, (start, end) in enumerate(
        [(0, 100), (111, 210), (221, 320), (501, 600)], start=1)]  # fmt: skip
    rows = found([*kernels, *nccl], launched(*kernels, *nccl))
    assert [(name, row["saving_us"]) for name, row in rows.items()] == [
        ("waiting_in_collectives", 170.0),
        ("exposed_communication", 30.0),
    ]
    assert (
        "at least 170 µs of that is waiting (time beyond the shortest collective of the same kind and size); the "
        "longest wait took 170 µs" in (rows["waiting_in_collectives"]["evidence"])
    )
    assert rows["waiting_in_collectives"]["advice"].startswith("Find the slow rank")


@pytest.mark.parametrize(("late", "waiting"), [({1: 15_000.0}, 15_000.0), ({}, 0.0)])
def test_a_rank_that_waits_is_told_what_it_waits_for_and_not_to_enlarge_buckets(
    late: dict[int, float], waiting: float
) -> None:
    run = simulate(fsdp(late=late, steps=10))
    rows = {row["finding"]: row for row in findings_view(run.context(0)).rows()}
    told = rows["waiting_in_collectives"]["saving_per_step_us"] if waiting else 0.0
    assert told == pytest.approx(waiting, abs=400)
    # of one step: 12 all_gathers of 400 us before whose end nothing goes on, and 6 reduce_scatters that hold these up
    assert rows["exposed_communication"]["saving_per_step_us"] == pytest.approx(12 * 400 + 6 * 480, rel=0.05)
    assert next(iter(rows)) == ("waiting_in_collectives" if waiting else "exposed_communication")


def test_waiting_in_the_warm_up_is_no_saving() -> None:
    job = ddp(ranks=2)
    begin, *rest = job.program
    late = replace(begin, us=(50.0, 3_000_000.0))  # rank 1, in the first step
    run = simulate(replace(job, program=(late, *rest)))
    rows = {row["finding"]: row for row in findings_view(run.context(0)).rows()}
    assert "waiting_in_collectives" not in rows
    assert rows["exposed_communication"]["evidence"].startswith("22.3 ms of collectives, 16.5 % of it while")


@pytest.mark.parametrize(("late", "gain"), [(0.0, 0.0), (15_000.0, 15_000.0)])
def test_where_hosts_are_late_waiting_gains_what_the_other_rank_is_later_and_transfers_nothing(
    late: float, gain: float
) -> None:
    run = simulate(host_bound(late=late))
    rows = {row["finding"]: row["saving_per_step_us"] for row in findings_view(run.context(0)).rows()}
    assert rows.get("waiting_in_collectives", 0.0) == pytest.approx(gain, abs=1_000)
    assert rows.get("exposed_communication", 0.0) < 1_000  # 30 transfers of 300 us
    assert next(iter(rows)) == ("waiting_in_collectives" if late else "synchronisation")


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
    assert found(kernels, calls, ops, [HOPPER])["no_tensor_cores"]["saving_us"] == 75.0
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
    assert (result.rows(), result.notes[0]) == ([], "the trace has no GPU activity")


def test_gpu_work_outside_of_the_steps_gives_no_finding_and_no_error() -> None:
    kernels = [row("void at::native::vectorized_elementwise_kernel<4, Add>", 0, 100, correlation=1)]
    steps = [row("ProfilerStep#1", 500, 600, thread=1, id=1, finished=1)]
    rows = listed(kernels, launched(*kernels), [row("aten::slow", 450, 600, thread=1, id=2)], user_annotation=steps)
    assert [(each["finding"], each["saving_us"], each["saving_pct"]) for each in rows] == [("host_bound", 100.0, 100.0)]


def python(name: str, start: float, end: float, **more: Any) -> Row:
    return row(name, start, end, thread=1, **more)


@pytest.mark.parametrize(
    ("inside", "finding", "does"),
    [
        ("<built-in function sleep>", "host_sleep", "sleeps"),
        ("threading.py(320): Condition.wait", "host_lock", "waits for a lock, a queue or another thread"),
        (
            "<built-in method read of _io.BufferedReader object>",
            "host_input_output",
            "waits for a file, a socket or a process",
        ),
        ("<built-in function print>", "host_logging", "prints or logs"),
        ("<built-in function collect>", "host_garbage_collection", "collects garbage"),
        ("<built-in function sorted>", "host_python", "runs Python code"),
    ],
)
def test_a_function_that_holds_the_host_up_is_named_and_the_advice_is_for_what_it_does(
    inside: str, finding: str, does: str
) -> None:
    kernels = [row("k", 5000 * n, 5000 * n + 900, correlation=n + 1) for n in range(4)]
    calls = [row("cudaLaunchKernel", 5000 * n - 5, 5000 * n - 1, thread=1, correlation=n + 1) for n in range(4)]
    frames = [
        python("train.py(3): main", 0, 16000),
        *(python(inside, 5000 * n + 850, 5000 * n + 4950) for n in range(3)),
    ]
    rows = listed(kernels, calls, python_function=[*frames, python("nn.Module: Net_0", 4960, 4970)])
    first = rows[0]
    assert (first["finding"], first["saving_us"]) == (finding, pytest.approx(3 * 4050, abs=600))
    assert first["title"] == f"The GPU is idle while the host {does} in main (train.py:3)"
    assert first["call_stack"] == "train.py(3): main"
    assert "torch.compile" not in first["advice"]
    assert sum(each["saving_us"] for each in rows) <= 15900


def test_the_line_that_waits_for_the_gpu_is_named() -> None:
    kernels = [row("k", 100 * n, 100 * n + 50, correlation=n + 1) for n in range(4)]
    calls = [row("cudaLaunchKernel", 100 * n - 5, 100 * n - 1, thread=1, correlation=n + 1) for n in range(4)]
    calls += [row("cudaStreamSynchronize", 100 * n + 10, 100 * n + 51, thread=1) for n in range(3)]
    frames = [python("train.py(3): main", -10, 400), python("train.py(9): log_loss", 0, 60, line=12)]
    frames += [python("train.py(9): log_loss", 100 * n, 100 * n + 60, line=12) for n in (1, 2)]
    (first, *_) = listed(kernels, calls, python_function=frames)
    assert (first["finding"], first["call_stack"]) == ("synchronisation", "train.py(9): log_loss;train.py(3): main")
    assert first["evidence"] == (
        "cudaStreamSynchronize 3 times, called in log_loss (train.py:12); the GPU was idle for 150 µs afterwards"
    )


def test_the_advice_is_what_the_gpu_can_follow() -> None:
    kernels = [row("volta_sgemm_128x64_nn", 0, 100, correlation=1), row("elementwise_kernel", 100, 300, correlation=2)]
    kernels.append(row("k", 700, 800, correlation=3))
    calls = [row("cudaLaunchKernel", n, n + 1, thread=1, correlation=n) for n in (1, 2)]
    calls.append(row("cudaLaunchKernel", 690, 695, thread=1, correlation=3))
    ops = [row("aten::mm", 0, 50, thread=1, id=1, finished=1), row("aten::slow", 60, 699, thread=1, id=2, finished=1)]

    def advice(major: int, minor: int, name: str = "GPU") -> dict[str, str]:
        device = {"id": 0, "name": name, "computeMajor": major, "computeMinor": minor}
        return {finding: each["advice"] for finding, each in found(kernels, calls, ops, [device]).items()}

    volta = advice(7, 0)
    assert "float16" in volta["no_tensor_cores"]
    assert "compute capability 7.0) support neither bfloat16 nor TF32" in volta["no_tensor_cores"]
    ampere, hopper, mi250 = advice(8, 0), advice(9, 0), advice(9, 0, "AMD Instinct MI250X")
    assert "TF32" in ampere["no_tensor_cores"] and "float8" not in ampere["no_tensor_cores"]
    assert "float8" in hopper["no_tensor_cores"]
    assert "TF32" not in mi250["no_tensor_cores"] and "float8" not in mi250["no_tensor_cores"]
    pascal = advice(6, 1)
    assert "no_tensor_cores" not in pascal
    assert "torch.compile needs compute capability 7.0, but this GPU has 6.1" in pascal["elementwise"]
    assert "torch.compile" not in pascal["host_bound"] and "torch.compile" in volta["host_bound"]


@pytest.mark.parametrize(
    "name",
    [
        "batched_transpose_32x32_half",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tensor16x8x16_execute_split_k_kernel__5x_cublas",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128>(Params)",
        "attn_fwd.kd",
    ],
)
def test_what_multiplies_no_matrices_needs_no_tensor_cores(name: str) -> None:
    kernels = [row(name, 0, 100, correlation=1)]
    calls = [row("cudaLaunchKernel", 1, 2, thread=1, correlation=1)]
    ops = [row("aten::convolution", 0, 50, thread=1, id=1)]
    assert "no_tensor_cores" not in found(kernels, calls, ops, [HOPPER])


def test_the_runtime_tells_whose_the_gpus_are() -> None:
    kernels = [row("gemm_k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    ops = [row("aten::mm", 0, 299, thread=1, id=1, finished=1)]

    def advice(call: str) -> dict[str, str]:
        calls = [row(call, 1, 2, thread=1, correlation=1), row(call, 290, 295, thread=1, correlation=2)]
        rows = found(kernels, calls, ops, [{**HOPPER, "name": ""}])
        return {finding: each["advice"] for finding, each in rows.items()}

    cuda, hip, intel = advice("cudaLaunchKernel"), advice("hipModuleLaunchKernel"), advice("urEnqueueKernelLaunch")
    assert "TF32" in cuda["no_tensor_cores"] and "CUDA graphs" in cuda["host_bound"]
    assert "TF32" not in hip["no_tensor_cores"] and "HIP graphs" in hip["host_bound"]
    assert "CUDA graphs" not in intel["host_bound"] and "torch.compile" in intel["host_bound"]


def test_elementwise_kernels_of_the_compiler_and_of_fused_optimizers_are_fused_already() -> None:
    kernels = [row("elementwise_kernel", 0, 100, correlation=1), row("triton_poi_fused_add_0", 100, 400, correlation=2)]
    kernels.append(row("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4> >", 400, 500, correlation=3))
    assert found(kernels, launched(*kernels))["elementwise"]["saving_us"] == 50.0
    assert "elementwise" not in found(kernels[1:], launched(*kernels[1:]))


def test_collectives_do_not_count_as_the_kernels_that_the_host_launches_too_slowly() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    kernels.append(row("ncclDevKernel_AllReduce", 400, 9400, correlation=3))
    calls = [row("cudaLaunchKernel", 10 * n, 10 * n + 1, thread=1, correlation=n) for n in (1, 3)]
    calls.append(row("cudaLaunchKernel", 290, 295, thread=1, correlation=2))
    bound = found(kernels, calls, [row("aten::slow", 100, 299, thread=1, id=1)])["host_bound"]
    assert "2 kernels of 100 µs on average" in bound["evidence"]


def test_a_larger_batch_is_not_advised_where_the_memory_is_full() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 300, 400, correlation=2)]
    calls = [row("cudaLaunchKernel", 290, 295, thread=1, correlation=2)]
    ops = [row("aten::slow", 100, 299, thread=1, id=1)]
    device = {**HOPPER, "totalGlobalMem": 100}

    def advised(allocated: int) -> bool:
        memory = [row("[memory]", 5, 5, thread=1, device_type=1, device=0, total_allocated=allocated)]
        return (
            "a larger batch" in found(kernels, calls, ops, [device], cpu_instant_event=memory)["host_bound"]["advice"]
        )

    assert (advised(50), advised(90)) == (True, False)


def test_torch_compile_is_not_advised_to_a_pytorch_without_it() -> None:
    kernels = [row("elementwise_kernel", 0, 100, correlation=1)]

    def advice(framework: str) -> str:
        made = trace({"kernel": kernels}, length_ns=100 * US, target=target(framework=framework))
        return str(findings_view(Context(made)).rows()[0]["advice"])

    assert "torch.compile needs PyTorch 2.0, but this is 1.13" in advice("torch 1.13.1+cu117")
    assert advice("torch 2.11.0+cu130").startswith("torch.compile can fuse such kernels")
    assert advice("").startswith("torch.compile can fuse such kernels")


def test_work_that_waits_in_its_queue_and_unknown_time_are_told_last() -> None:
    kernels = [row("k", 0, 100, correlation=1), row("k", 600, 700, correlation=2), row("k", 1500, 1550, correlation=9)]
    calls = [row("cudaLaunchKernel", 50, 60, thread=1, correlation=2), *launched(kernels[0])]
    rows = listed(kernels, calls)
    assert [(each["finding"], each["saving_us"]) for each in rows] == [("unknown_idle", 800.0), ("queued", 500.0)]
    assert rows[0]["advice"] == "The launch that ended the gap is not in the trace."


def sampled(moments: Sequence[tuple[int, str, str]], strings: StringTable) -> Any:
    """The table that samples (Unix ns, innermost function below main, state) every 10 ms are decoded to."""
    names = ["train.py(1): main", *dict.fromkeys(name for _, name, _ in moments)]
    count = len(names)
    trie = Trie(
        keys=np.arange(1, count + 1, dtype=np.uint64),
        parent=np.array([0, 0, *[1] * (count - 1)]),
        frame=np.arange(count + 1),
        line=np.array([0, *range(100, 100 + count)]),
        callee=np.full(count + 1, NO_STRING),
        depth=np.array([-1, 0, *[1] * (count - 1)]),
        name=np.array([0, *strings.add_all(names)]),
        call_line=np.zeros(count + 1, np.int64),
    )
    node = np.array([names.index(name) + 1 for _, name, _ in moments])
    state = np.array([STATES.index(state) for *_, state in moments])
    time, none = np.array([moment for moment, *_ in moments]), np.zeros(len(moments), np.int64)
    samples = Samples(time, np.ones_like(time), node, trie.line[node], trie.callee[node], state, none, none)
    return slices(samples, trie, 10 * MS, strings)


def test_samples_that_are_rarer_than_the_gaps_tell_how_long_each_function_held_the_host_up() -> None:
    """300 steps of 21 ms: the GPU is idle for 6 ms of each, in which the host sleeps 4.1 ms and augments for 1.9 ms."""
    random, step, steps = np.random.default_rng(3), 21 * MS, 300
    kernels = [row("k", (n * step + 6 * MS) / US, (n + 1) * step / US, correlation=n + 1) for n in range(steps)]
    calls = [row("cudaLaunchKernel", each["start"] / US - 5, each["start"] / US - 1, thread=1,
                 correlation=each["correlation"]) for each in kernels]  # fmt: skip
    ops = [row("aten::mm", (n * step + 6 * MS) / US, (n + 1) * step / US, thread=1, id=n + 1) for n in range(steps)]
    moments = []
    for moment in range(2 * MS, steps * step, 10 * MS):
        at = moment + int(random.integers(-300_000, 300_000))
        inside = at % step
        function = "throttle" if inside < 4_100_000 else "augment" if inside < 6 * MS else "forward"
        state = "idle" if function == "throttle" else "running"
        moments.append((START_NS + at, f"train.py({len(function)}): {function}", state))
    strings = StringTable()
    tables = {"kernel": kernels, "cuda_runtime": calls, "cpu_op": [{**each, "finished": 1} for each in ops]}
    made = {kind: table(kind, rows, strings) for kind, rows in tables.items()}
    made["python_function"] = sampled(moments, strings)
    whole = Trace(target=target(), strings=strings.strings, tables=made, window_start_ns=START_NS,
                  window_end_ns=START_NS + steps * step, sample_period_ns=10 * MS)  # fmt: skip
    rows = {each["finding"]: each for each in findings_view(Context(whole)).rows()}
    assert list(rows)[:2] == ["host_blocked", "host_python"]
    blocked, augmenting = rows["host_blocked"], rows["host_python"]
    assert blocked["title"].startswith("The GPU is idle while the host is off the CPU in throttle (train.py:")
    assert blocked["advice"].startswith("Take the wait out of the loop, ")
    assert augmenting["title"].startswith("The GPU is idle while the host runs Python code in augment (train.py:")
    assert blocked["saving_us"] / steps == pytest.approx(4100, rel=0.15)
    assert augmenting["saving_us"] / steps == pytest.approx(1900, rel=0.3)


COMPILES = Finding(
    name="recompilation", title="compiles", saving_ns=900 * US, advice="", evidence="", where="main (/job/train.py:10)"
)


@pytest.mark.parametrize(
    ("idle_ns", "told"),
    [
        (1_200 * US, [("recompilation", 1_200 * US)]),
        (700 * US, [("recompilation", 900 * US)]),
        (1_400 * US, [("host_python", 1_400 * US), ("recompilation", 900 * US)]),
    ],
)
def test_idle_time_in_a_function_that_compiles_is_told_once_unless_it_is_much_longer(
    idle_ns: int, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Program()
    made.host(4_000 * US)
    made.launch(100 * US)
    made.wait()
    made.rows["python_function"] = stack_rows([MAIN], thread=THREAD)
    idle = Finding(name="host_python", title="runs Python", saving_ns=idle_ns, advice="", evidence="", frame=1)
    monkeypatch.setattr(finding_views, "FINDERS", (lambda _context: iter([COMPILES, idle]),))
    found = findings(made.context()).findings
    assert [(finding.name, finding.saving_ns) for finding in found] == told


SLICE_US = 2400


def ran(
    extra_us: Sequence[float],
    *,
    names: int = 4,
    gap_us: Sequence[float] = (),
    prefix: str = "kernel",
    larger: bool = False,
) -> list[Finding]:
    """Kernels of 100 us, launched long ahead, every fifth one with the next of extra_us; some after the next gap_us.

    larger: those with extra time have a larger grid.
    """
    kernels: list[Row] = []
    at, gaps, extra = 0.0, list(gap_us), list(extra_us)
    for number in range(max(5 * len(extra_us), 100)):
        if gaps and number % 5 == 2:
            at += gaps.pop()
        length = 100 + (extra.pop() if extra and number % 5 == 0 else 0)
        grid = 2 if larger and length > 100 else 1
        kernels.append(row(f"{prefix}_{number % names}", at, at + length, correlation=number + 1, grid_x=grid))
        at += length
    made = Context(trace({"kernel": kernels, "cuda_runtime": launched(*kernels)}, length_ns=int(at * US)))
    return [finding for finding in findings(made).findings if finding.name == "gpu_shared"]


def test_slices_that_are_missing_in_kernels_and_between_them_are_another_program() -> None:
    (finding,) = ran([SLICE_US + number for number in range(20)], gap_us=[SLICE_US] * 6)
    assert finding.title == "Another program takes turns with this one on the GPU"
    assert finding.saving_ns == pytest.approx(26 * SLICE_US * US, rel=0.01)
    assert finding.evidence.startswith("26 time slices of 2.41 ms")


@pytest.mark.parametrize(
    ("extra_us", "others"),
    [
        ([600 + 300 * number for number in range(20)], {}),
        ([SLICE_US] * 5, {}),
        ([SLICE_US] * 20, {"names": 2}),
        ([SLICE_US] * 20, {"larger": True}),
        ([SLICE_US] * 20, {"prefix": "nvjet_gemm"}),
        ([], {}),
    ],
    ids=["different times", "few", "two kinds in two sizes", "larger grids", "products of any size", "one length"],
)
def test_kernels_that_may_have_more_to_do_prove_no_other_program(extra_us: list[float], others: dict[str, Any]) -> None:
    assert ran(extra_us, **others) == []
