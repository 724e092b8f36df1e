"""Times in these traces are microseconds."""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.cause_views import time_causes_view
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.time_causes import CAUSES, TITLES, measured_steps
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.cause_checks import wrong
from support.trace_files.traces import H100, START_NS, trace

US = 1000
Row = dict[str, Any]
H200 = Path(__file__).parents[3] / "data" / "h200"
MS = 1_000_000


def row(name: str, start: int, end: int, **more: Any) -> Row:
    return {"name": name, "start": start * US, "duration": (end - start) * US, **more}


def shares(context: Context, **options: Any) -> dict[str, float]:
    return {each["cause"]: each["total_us"] for each in time_causes_view(context, **options).rows()}


def test_while_the_gpu_works_the_most_useful_work_counts() -> None:
    kernels = [
        row("sgemm", 0, 100, stream=1),
        row("vectorized_elementwise_kernel", 50, 200, stream=2),
        row("softmax", 150, 250, stream=3),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 200, 400, stream=4),
    ]
    copies = [
        row("Memcpy HtoD (Pageable -> Device)", 350, 500, stream=5),
        row("Memcpy HtoD (Pinned -> Device)", 450, 600, stream=6),
        row("Memcpy DtoD (Device -> Device)", 550, 700, stream=7),
        row("CopyHostToDevice", 650, 800, stream=7),
    ]
    fills = [row("Memset (Device)", 700, 1000, stream=8)]
    context = Context(trace({"kernel": kernels, "gpu_memcpy": copies, "gpu_memset": fills}, length_ns=1000 * US))
    assert shares(context) == {
        "matrix_products": 100.0,
        "elementwise": 100.0,
        "other_kernels": 50.0,
        "communication": 150.0,
        "pageable_copies": 100.0,
        "pinned_copies": 100.0,
        "device_copies": 100.0,
        "other_copies": 100.0,
        "fills": 200.0,
    }


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int, int const*)", "other_kernels"),
        ("void split_embedding_forward_kernel<float>(fbgemm_gpu::enum_placement const*)", "other_kernels"),
        ("void fbgemm_gpu::grouped::gemm_kernel<float>(float*)", "matrix_products"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(__nv_bfloat16 const*)", "other_kernels"),
        ("SubTensorOpWithScalar1d", "other_kernels"),
        ("cask_cudnn::computeWgradSplitKOffsetsKernel(cask_cudnn::ComputeSplitKOffsetsParams)", "other_kernels"),
        ("triton_red_fused__unsafe_view_matmul_native_layer_norm_19", "other_kernels"),
        ("void tensorrt_llm::ConvertLayout<float>(float*)", "other_kernels"),
        ("volta_scudnn_128x64_stridedB_interior_nn_v1", "matrix_products"),
        ("attn_fwd.kd", "matrix_products"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_sm100f", "matrix_products"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "matrix_products"),
    ],
)
def test_what_a_kernel_computes_is_told_by_its_name(name: str, cause: str) -> None:
    assert shares(Context(trace({"kernel": [row(name, 0, 100)]}, length_ns=100 * US))) == {cause: 100.0}


def test_what_was_not_recorded_is_neither_work_nor_idle() -> None:
    rows = {
        "kernel": [row("sgemm", 0, 100, correlation=1), row("sgemm", 900, 1000, correlation=2)],
        "cuda_runtime": [row("cudaLaunchKernel", 850, 855, correlation=2, thread=1)],
        "cpu_op": [row("aten::mm", 0, 1000, thread=1, id=1, finished=1)],
    }
    missing = ((START_NS + 300 * US, START_NS + 700 * US),)
    lost = SourceCoverage(source="cupti", kinds=("kernel", "gpu_memcpy", "gpu_memset"), missing=missing)
    found = shares(Context(trace(rows, length_ns=1000 * US, coverage=(lost,))))
    assert (found["unrecorded"], sum(found.values())) == (400.0, 1000.0)
    assert found["operators"] == 350.0  # until the record ends, and from its beginning to the launch
    assert "unrecorded" not in shares(Context(trace(rows, length_ns=1000 * US)))


def stepping(lengths: list[int]) -> Context:
    """Steps, each with a kernel in its last 10 us, and the host in an operator before."""
    ends = np.cumsum(lengths).tolist()
    steps = [row(f"ProfilerStep#{n}", end - length, end, thread=1, id=n + 1, finished=1)
             for n, (length, end) in enumerate(zip(lengths, ends, strict=True))]  # fmt: skip
    ops = [row("aten::mm", end - length, end - 9, thread=1, id=100 + n, finished=1)
           for n, (length, end) in enumerate(zip(lengths, ends, strict=True))]  # fmt: skip
    kernels = [row("sgemm", end - 10, end, correlation=n + 1) for n, end in enumerate(ends)]
    calls = [row("cudaLaunchKernel", end - 12, end - 11, correlation=n + 1, thread=1) for n, end in enumerate(ends)]
    rows = {"kernel": kernels, "cuda_runtime": calls, "cpu_op": ops, "user_annotation": steps}
    return Context(trace(rows, length_ns=sum(lengths) * US))


def test_a_step_is_the_mean_of_the_steps_that_are_no_warm_up() -> None:
    context = stepping([10_000, 100, 110, 90])
    result = time_causes_view(context)
    assert [(each["cause"], each["total_us"], each["step_us"], each["what"]) for each in result.rows()] == [
        ("operators", 264.0, 88.0, "aten::mm"),
        ("matrix_products", 30.0, 10.0, None),
        ("launch_latency", 6.0, 2.0, "aten::mm"),
    ]
    assert result.notes == ("warm-up is left out of means and savings: step 0 (10 ms; the others take 100 µs)",)
    assert shares(context, warm_up=True) == {"operators": 10252.0, "matrix_products": 40.0, "launch_latency": 8.0}


def test_a_slow_first_step_is_no_finding() -> None:
    found = stepping([10_000, 100, 110, 90]).get(findings)
    assert (found.window_ns, found.steps) == (300 * US, 3)
    assert found.findings[0].name == "host_bound"
    assert found.findings[0].saving_ns == 268 * US  # but for the time from a launch to its kernel


def test_details_have_a_row_for_each_operator() -> None:
    ops = [row("aten::a", 0, 300, thread=1, id=1, finished=1), row("aten::b", 300, 980, thread=1, id=2, finished=1)]
    rows = {
        "kernel": [row("sgemm", 1000, 1100, correlation=1)],
        "cuda_runtime": [row("cudaLaunchKernel", 980, 990, correlation=1, thread=1)],
        "cpu_op": ops,
    }
    context = Context(trace(rows, length_ns=1100 * US))
    listed = [(each["cause"], each["what"], each["total_us"]) for each in time_causes_view(context, detail=True).rows()]
    assert listed == [
        ("operators", "aten::b", 680.0),
        ("operators", "aten::a", 300.0),
        ("matrix_products", None, 100.0),
        ("launch_latency", "cudaLaunchKernel", 20.0),
    ]


def test_a_trace_without_gpu_activity_says_so() -> None:
    result = time_causes_view(Context(trace({})))
    assert (result.rows(), result.notes) == ([], ("the trace has no GPU activity",))


def test_every_cause_has_a_title() -> None:
    assert sorted(TITLES) == sorted(CAUSES)


def anything(seed: int) -> Context:
    """A trace of random events on 2 GPUs and 3 threads, often wrong: overlapping, without launches, out of steps."""
    random = np.random.default_rng(seed)

    def events(names: list[str], count: int, longest: int, **columns: int) -> list[Row]:
        return [
            {
                "name": str(random.choice(names)),
                "start": int(random.integers(-200_000, 1_200_000)),
                "duration": int(random.integers(0, longest)),
                **{name: int(random.integers(0, most)) for name, most in columns.items()},
            }
            for _ in range(random.integers(0, count))
        ]

    ops = ["aten::mm", "gloo:all_reduce", "enumerate(DataLoader)#_X.__next__", "ProfilerStep#7", "Optimizer.step#S"]
    calls = ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMalloc", "cudaMemcpy", "cudaGraphLaunch"]
    python = ["train.py(1): main", "<built-in function sleep>", "torch/utils/data/dataloader.py(1): __next__",
              "queue.py(1): get", "torch/autograd/graph.py(1): _engine_run_backward"]  # fmt: skip
    sampled = {"samples": 4, "self_samples": 4, "idle": 2, "running": 2, "waiting": 2} if seed % 2 else {}
    rows = {
        "kernel": events(["sgemm", "ncclDevKernel_X", "elementwise_kernel"], 60, 40_000, device=2, correlation=40),
        "gpu_memcpy": events(["Memcpy HtoD (Pageable -> Device)", "DtoD"], 20, 30_000, device=2, correlation=40),
        "gpu_memset": events(["Memset"], 5, 9_000, device=2, correlation=40),
        "cuda_runtime": events(calls, 60, 80_000, thread=3, correlation=40),
        "cpu_op": events(ops, 40, 200_000, thread=3, finished=2),
        "user_annotation": [
            {**each, "name": f"ProfilerStep#{n}"} for n, each in enumerate(events(["x"], 5, 500_000, thread=2))
        ],
        "python_function": events(python, 40, 300_000, thread=3, **sampled),
    }
    return Context(trace(rows, length_ns=1_000_000, sample_period_ns=20_000 if sampled else 0, devices=[H100]))


@pytest.mark.parametrize("seed", range(60))
def test_the_causes_of_any_trace_sum_to_its_steps(seed: int) -> None:
    assert wrong(anything(seed)) == []


@pytest.mark.parametrize("name", ["rank0", "rank1", "rank2", "rank3"])
def test_the_causes_of_a_recorded_training_sum_to_its_steps(name: str) -> None:
    assert wrong(Context(open_trace(H200 / "ddp4" / f"{name}.json.gz"))) == []


@pytest.mark.parametrize("name", ["mlp", "graph", "streams"])
def test_the_causes_of_what_kineto_recorded_sum_to_its_steps(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(lzma.decompress((H200 / f"{name}-kineto.json.xz").read_bytes()))
    context = Context(open_trace(path))
    assert wrong(context) == []
    assert time_causes_view(context).rows()


def kernels(*times: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {"name": "k", "start": start * MS, "duration": (end - start) * MS, "correlation": n + 1}
        for n, (start, end) in enumerate(times)
    ]


def test_without_steps_what_happens_once_at_the_beginning_is_warm_up() -> None:
    """CUDA is initialised for 5 s, and the first convolution takes 3 s; then there is a kernel each 10 ms."""
    steady = [(8100 + 10 * n, 8105 + 10 * n) for n in range(50)]
    made = trace({"kernel": kernels((5000, 5001), (8001, 8002), *steady)}, length_ns=8600 * MS)
    found = Context(made).get(measured_steps)
    assert (found.start - START_NS).tolist() == [0, 8001 * MS]
    assert found.left_out.tolist() == [True, False]
    assert found.measured_ns == 599 * MS
    assert found.note() == "the first 8 s, up to the end of a gap that does not recur, are warm-up and left out"


def test_gaps_that_recur_are_no_warm_up() -> None:
    made = trace({"kernel": kernels(*((1000 * n + 900, 1000 * n + 1000) for n in range(4)))}, length_ns=4000 * MS)
    found = Context(made).get(measured_steps)
    assert (len(found.start), found.note(), found.measured_ns) == (1, None, 4000 * MS)


def test_an_empty_trace_has_no_warm_up_to_tell_of() -> None:
    assert measured_steps(Context(trace({}, length_ns=0))).note() is None
